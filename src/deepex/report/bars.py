"""Bars with names: upright where the names are short, lying where they are long.

view, height = bar_view(["a", "b"], [Bars(name="steady", values=[1.0, 2.0])], axis="seconds", form=".3s")
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from deepex.report.figure import Trace, View, axes, plain, thin
from deepex.speedup.statistics import Interval

_LONG: Final = 16  # letters of the longest name that still stands below a bar
_MANY: Final = 12
_MOST: Final = 40


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One bar for each name; `intervals` give error bars. `series` is the colour."""

    name: str
    values: Sequence[float | None]
    intervals: Sequence[Interval] | None = None
    series: int = 0

    def thinned(self, most: int) -> "Bars":
        """At most `most` of them, evenly."""
        intervals = thin(self.intervals, most) if self.intervals is not None else None
        return replace(self, values=thin(self.values, most), intervals=intervals)


def bar_view(
    labels: Sequence[str],
    rows: Sequence[Bars],
    *,
    axis: str,
    names: str = "",
    form: str = ",.3~r",
    unit: str = "",
    stack: bool = False,
    points: bool = False,
    label: str = "",
) -> tuple[View, int]:
    """The view and how high it should be. `form` is the number format of hover and axis, `points` draws marks for bars.

    Of more names than can be told apart some are drawn, evenly, and the axis says so: a browser takes a minute for a thousand.
    """
    if len(labels) > _MOST and not stack:
        axis = f"{axis} ({_MOST} of {len(labels):,} are drawn; the table has all)"
        labels, rows = thin(labels, _MOST), [one.thinned(_MOST) for one in rows]
    numbers = len(labels) > _MANY and all(one.isdigit() for one in labels)
    lying = not numbers and (max(map(len, labels)) > _LONG or len(labels) > _MANY)
    shown = [_broken(one) if lying else plain(one) for one in labels]
    # By place, not by name: names that are alike once they are cut would share a bar.
    places = [int(one) for one in labels] if numbers else list(range(len(labels)))
    named = {"automargin": True} if numbers else {"automargin": True, "tickvals": places, "ticktext": shown, "zeroline": False}
    hover = [plain(one) for one in labels]
    traces = [_trace(places, hover, one, form + "}" + unit, lying=lying, points=points) for one in rows]
    value = {"rangemode": "tozero", **({"tickformat": form} if form.endswith("%") else {})}
    mode = {"barmode": "stack" if stack else "group"}
    if not lying:
        return View(traces=traces, layout=axes(names, axis, xaxis=named, yaxis=value) | mode, label=label), 360
    line = 24 if stack or points or len(rows) == 1 else 30
    height = 110 + len(labels) * max(line, 16 * max(one.count("<br>") + 1 for one in shown))
    layout = axes(axis, "", xaxis=value, yaxis=named | {"autorange": "reversed"})
    return View(traces=traces, layout=layout | mode, label=label), min(height, 1100)


def _trace(places: Sequence[int], names: Sequence[str], row: Bars, form: str, *, lying: bool, points: bool) -> Trace:
    value, place = ("x", "y") if lying else ("y", "x")
    trace: dict[str, Any] = {
        "type": "scatter" if points else "bar",
        place: list(places),
        value: list(row.values),
        "name": plain(row.name),
        "customdata": list(names),
        "hovertemplate": f"%{{customdata}}: %{{{value}:{form}<extra>{'%{fullData.name}' if row.name else ''}</extra>",
        "meta": {"series": row.series, "role": "line" if points else "bar"},
    }
    trace |= {"mode": "markers"} if points else {"orientation": "h"} if lying else {}
    if row.intervals is not None:
        up = [one.high - one.value for one in row.intervals]
        down = [one.value - one.low for one in row.intervals]
        bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5, "width": 4}
        trace[f"error_{value}"] = bars
    return trace


def _broken(text: str, width: int = 26) -> str:
    """In lines, at commas, so that a long name leaves room for its bar."""
    lines = [""]
    for part in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += (", " if lines[-1] else "") + part
    cut = [line if len(line) <= 2 * width else line[: 2 * width - 1] + "…" for line in lines[:4]]
    return ",<br>".join(map(plain, cut))
