"""What a report of 1,000 runs takes to make, and how smoothly it scrolls: a sweep of 1,000 settings, a study of 10 × 100 repeats.

    python benchmarks/report.py

The records are made up (tests/report/records.py), of 10 epochs each, with phases, drift and usage. Time is that of the whole
command `deepex report`. Chromium scrolls through the page and back, figures are drawn on the way down; a frame that takes more than
50 ms is felt. Beside them stands a study of 10 runs.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import bench

sys.path.insert(0, str(Path(__file__).parent.parent))

from playwright.sync_api import sync_playwright
from tests.report.records import Made, write_run, write_study

FELT_MS: Final = 50.0
SCROLL: Final = """async (pixels) => {
  const frame = () => new Promise(requestAnimationFrame), times = [];
  const end = document.body.scrollHeight - innerHeight;
  document.documentElement.style.scrollBehavior = "auto";
  for (const way of [1, -1]) {
    let last = await frame();
    for (let y = 0; y < end; y += pixels) {
      scrollTo(0, way > 0 ? y : end - y);
      const now = await frame();
      times.push(now - last);
      last = now;
    }
  }
  return times;
}"""


def sweep(folder: Path, many: int) -> None:
    """As many runs on their own, each of another rate and period."""
    for at in range(many):
        config = {"optim": {"rate": 0.001 * (1 + at % 100)}, "sync": {"period": 1 + at // 100}}
        write_run(folder / f"run-{at:04}", Made(ranks=4, epochs=10, seed=at, usage=True, drift=True, config=config))


def strong(folder: Path, many: int) -> None:
    """A study of ten numbers of ranks."""
    ranks = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    made = [({"ranks": p}, Made(ranks=p, epochs=10, seed=at, usage=True, drift=p > 1)) for at in range(many // 10) for p in ranks]
    write_study(folder, "strong", made, targets=["validation error <= 0.2"])


def timed(folder: Path, out: Path) -> float:
    """Seconds of the command."""
    began = perf_counter()
    subprocess.run([sys.executable, "-m", "deepex", "report", str(folder), "-o", str(out)], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - began


def scrolled(report: Path) -> list[float]:
    """Milliseconds of every frame."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900}, bypass_csp=True)
        page.goto(report.as_uri())
        page.wait_for_function("window.Plotly !== undefined")
        times: list[float] = page.evaluate(SCROLL, 120)
        browser.close()
    return times


def main() -> None:
    options = bench.arguments(__doc__, repeats=3, threads=1)
    made: dict[str, tuple[Callable[[Path, int], None], int]] = {
        "sweep of 1,000 settings": (sweep, 1000),
        "strong, 10 x 100 repeats": (strong, 1000),
        "strong, 10 runs": (strong, 10),
    }
    rows, result = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        for title, (make, many) in made.items():
            folder, out = Path(name) / title.replace(" ", "-"), Path(name) / "report.html"
            make(folder, many)
            seconds = [timed(folder, out) for _ in range(options.repeats)]
            frames = scrolled(out)
            felt = [time for time in frames if time > FELT_MS]
            result[title] = {"seconds": seconds, "bytes": out.stat().st_size, "frames_ms": frames}
            rows.append(
                [
                    title,
                    f"{statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})",
                    f"{out.stat().st_size / 1e6:.2f}",
                    len(frames),
                    f"{statistics.median(frames):.0f}",
                    f"{100 * len(felt) / len(frames):.1f} %",
                    f"{max(frames):.0f}",
                ]
            )
    columns = [
        "records",
        "s to make (aim: below 10)",
        "MB (aim: below 6)",
        "frames",
        "median ms",
        f"above {FELT_MS:.0f} ms",
        "longest ms",
    ]
    bench.print_table(f"a report of 1,000 runs; {options.repeats} makings", columns, rows)
    bench.write_record("report", {"results": result}, keep=options.keep)


if __name__ == "__main__":
    main()
