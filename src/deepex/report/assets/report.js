"use strict";
// Draws the figures of a report when they come near the screen, and before printing. All data is in this file.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const PRINT_WIDTH = 660; // what fits between the margins of A4, in CSS pixels
  const MOST_ROWS = 2000;
  const drawn = new Map(); // figure id → the view that is drawn
  let printing = false;

  // ---- theme: follows the system until the reader chooses
  const themes = ["system", "light", "dark"];
  let chosen = remembered() || "system";
  function remembered() {
    try { return themes.find((name) => name === localStorage.getItem("deepex-theme")); } catch { return null; } // file:// may forbid it
  }
  function themeNow() {
    if (printing) return "light";
    return chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  }
  function applyTheme() {
    root.dataset.theme = themeNow();
    document.getElementById("theme").textContent = `Theme: ${chosen}`;
    redrawAll();
  }
  document.getElementById("theme").addEventListener("click", () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    try { localStorage.setItem("deepex-theme", chosen); } catch { /* it then holds for this visit */ }
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);

  // ---- plotly.js
  let loading = null;
  function library() {
    loading = loading || inflate(document.getElementById("library").textContent);
    return loading;
  }
  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Plotly;
  }

  // ---- colours: a trace says which series it is, the theme says what that looks like
  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  function colour(meta) {
    if (meta.ramp === null || meta.ramp === undefined) return variable(`--series-${(meta.series || 0) % 8}`);
    const at = Math.min(Math.max(meta.ramp, 0), 1) * 4;
    const from = channels(variable(`--ramp-${Math.floor(at)}`)), to = channels(variable(`--ramp-${Math.ceil(at)}`));
    return "#" + from.map((value, i) => Math.round(value + (at % 1) * (to[i] - value)).toString(16).padStart(2, "0")).join("");
  }
  const faint = (hex, alpha) => `rgba(${channels(hex).join(",")},${alpha})`;
  const bounds = (trace, own) => Object.fromEntries(["error_x", "error_y"].filter((name) => trace[name]).map((name) => [name, { ...trace[name], color: own }]));
  const painters = {
    line: (trace, own) => ({
      line: { width: 2.2, ...trace.line, color: own },
      marker: { size: 8, ...trace.marker, color: own, line: { width: 1.5, color: own } },
      ...bounds(trace, own),
    }),
    band: (trace, own) => ({ fillcolor: faint(own, 0.18) }),
    guide: () => ({ line: { dash: "dot", width: 1.5, color: variable("--quiet") } }),
    bar: (trace, own) => ({ marker: { color: own }, ...bounds(trace, variable("--ink")) }),
    box: (trace, own) => ({ fillcolor: faint(own, 0.3), line: { color: own, width: 1.5 }, marker: { color: own, size: 6 }, showlegend: false }),
    heat: () => ({ colorscale: "Cividis", reversescale: true, xgap: 2, ygap: 2 }),
    ring: () => ({ marker: { symbol: "circle-open", size: 46, color: variable("--series-1"), line: { width: 3 } } }),
  };
  const painted = (trace) => ({ ...trace, ...painters[trace.meta.role](trace, colour(trace.meta)) });

  function layoutOf(view, width, height) {
    const ink = variable("--ink"), quiet = variable("--quiet");
    const narrow = width < 520;
    const axis = (given) => ({
      gridcolor: variable("--grid"), linecolor: variable("--rule"), zerolinecolor: variable("--rule"), tickcolor: variable("--rule"),
      automargin: true, tickfont: { color: quiet }, ...given, title: { standoff: 10, font: { color: quiet, size: 13 }, ...given.title },
    });
    const given = view.layout.xaxis || {};
    const few = !given.type && view.traces.every((trace) => (trace.x || [0.5]).every((x) => Number.isInteger(x) && x <= 12));
    const named = view.traces.filter((trace) => trace.name && trace.showlegend !== false && trace.type !== "heatmap").length;
    return {
      ...view.layout, width, height,
      xaxis: axis(few ? { dtick: 1, ...given } : given), yaxis: axis(view.layout.yaxis || {}),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11.5 : 13, color: ink },
      margin: { l: narrow ? 48 : 64, r: narrow ? 10 : 20, t: 12, b: 48 },
      showlegend: named > 1, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hovermode: "closest", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { bgcolor: variable("--raised"), bordercolor: variable("--rule"), font: { color: ink }, namelength: -1, align: "left" },
      bargap: 0.3, separators: ".,",
    };
  }

  // ---- drawing
  const figures = [...document.querySelectorAll("figure")].filter((figure) => data[figure.id]);
  function draw(figure, width) {
    const plot = figure.querySelector(".plot");
    const view = data[figure.id].views[drawn.get(figure.id) || 0];
    const wide = width || plot.clientWidth;
    const height = Number(plot.dataset.height) * (wide < 520 ? 0.95 : 1);
    plot.style.height = `${height}px`;
    drawn.set(figure.id, drawn.get(figure.id) || 0);
    plot.dataset.drawn = "true";
    return window.Plotly.react(plot, view.traces.map(painted), layoutOf(view, wide, height), { displayModeBar: false, doubleClick: "reset" });
  }
  const isDrawn = (figure) => figure.querySelector(".plot").dataset.drawn === "true";
  function redrawAll() {
    if (window.Plotly) figures.filter(isDrawn).forEach((figure) => draw(figure));
  }
  function fail(figure, error) {
    const note = document.createElement("p");
    note.className = "waiting";
    note.textContent = `This browser cannot draw the figure (${error.message}); its data table and CSV are below.`;
    figure.querySelector(".plot").replaceChildren(note);
  }
  const watcher = new IntersectionObserver((entries) => {
    entries.filter((entry) => entry.isIntersecting).forEach(async (entry) => {
      watcher.unobserve(entry.target);
      try { await library(); await draw(entry.target); } catch (error) { fail(entry.target, error); }
    });
  }, { rootMargin: "600px 0px" });
  figures.forEach((figure) => watcher.observe(figure));
  let wait = 0, last = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === last || printing) return; // a phone's address bar changes the height alone
    last = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redrawAll, 120);
  });
  addEventListener("beforeprint", () => {
    if (!window.Plotly) return;
    printing = true;
    root.dataset.theme = "light";
    figures.forEach((figure) => { watcher.unobserve(figure); draw(figure, PRINT_WIDTH); });
  });
  addEventListener("afterprint", () => { printing = false; applyTheme(); });

  // ---- tables
  const shown = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    return Number.isInteger(value) ? value.toLocaleString("en-GB") : String(Number(value.toPrecision(4)));
  };
  function fill(details, entry) {
    if (details.querySelector("table")) return;
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    const numeric = entry.columns.map((_, at) => entry.rows.some((row) => typeof row[at] === "number"));
    entry.columns.forEach((name, at) => {
      const cell = document.createElement("th"), button = document.createElement("button");
      cell.scope = "col";
      cell.className = numeric[at] ? "number" : "";
      button.type = "button";
      button.textContent = name;
      cell.append(button);
      head.append(cell);
    });
    const body = table.createTBody();
    entry.rows.slice(0, MOST_ROWS).forEach((row) => {
      const line = body.insertRow();
      row.forEach((value, at) => {
        const cell = line.insertCell();
        cell.textContent = shown(value);
        cell.className = numeric[at] ? "number" : "";
        if (typeof value === "number") cell.dataset.value = value;
      });
    });
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.append(table);
    details.append(scroll);
    if (entry.rows.length > MOST_ROWS) details.append(`The first ${MOST_ROWS} of ${entry.rows.length} rows; the CSV has all.`);
  }
  const key = (cell) => cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  function compare(a, b) {
    const [x, y] = [key(a), key(b)];
    if (typeof x === "number" && typeof y === "number") return x - y;
    return String(x).localeCompare(String(y), "en", { numeric: true });
  }
  document.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head || !event.target.closest("button")) return;
    const body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    [...head.parentElement.cells].forEach((cell) => cell.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(a.cells[head.cellIndex], b.cells[head.cellIndex]));
    body.append(...rows);
  });

  // ---- downloads
  function csvOf(entry) {
    const cell = (value) => {
      if (value === null || value === undefined) return "";
      let text = String(value);
      if (typeof value === "string" && /^[=+@\t\r-]/.test(text)) text = `'${text}`; // a spreadsheet would run it
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [entry.columns, ...entry.rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  }
  function save(name, kind, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  async function saveSvg(figure) {
    await library();
    const entry = data[figure.id], view = entry.views[drawn.get(figure.id) || 0], height = Number(figure.querySelector(".plot").dataset.height);
    const before = root.dataset.theme;
    root.dataset.theme = "light"; // for paper, whatever the screen is
    const layout = { ...layoutOf(view, 860, height), paper_bgcolor: "#ffffff" };
    const traces = view.traces.map(painted);
    root.dataset.theme = before;
    const url = await window.Plotly.toImage({ data: traces, layout }, { format: "svg", width: 860, height });
    save(`${entry.name}.svg`, "image/svg+xml", decodeURIComponent(url.slice(url.indexOf(",") + 1)));
  }
  figures.forEach((figure) => {
    const entry = data[figure.id];
    const details = figure.querySelector("details.data");
    details.addEventListener("toggle", () => details.open && fill(details, entry));
    figure.querySelector(".csv").addEventListener("click", () => save(`${entry.name}.csv`, "text/csv", csvOf(entry)));
    figure.querySelector(".svg").addEventListener("click", () => saveSvg(figure));
    figure.querySelectorAll(".views button").forEach((button) => button.addEventListener("click", () => {
      figure.querySelectorAll(".views button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      drawn.set(figure.id, Number(button.dataset.view));
      if (isDrawn(figure)) draw(figure);
    }));
  });

  root.dataset.theme = themeNow();
  document.getElementById("theme").textContent = `Theme: ${chosen}`;
  if (figures.length) setTimeout(() => library().catch(() => {}), 0); // so that it is there when the page is printed
})();
