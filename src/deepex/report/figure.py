"""A figure as data: what it shows in words, the numbers as a table, and traces that plotly.js draws.

    Figure(title="Speedup", sentence="4 ranks are 2.9 times as fast.", alt="A line that …", columns=["ranks", "speedup"],
           rows=[[1, 1.0], [4, 2.9]], views=[View(traces=[line("measured", [1, 4], [1.0, 2.9], series=0)])])

Colours are not given here: a trace says which `series` it is (or where on a `ramp`), and the page paints it for its theme.
plotly.js takes some HTML in names and labels, so every text that comes from a record passes through `plain`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log2, log10
from typing import Any, Final, TypeVar

from deepex.report.words import number

T = TypeVar("T")
Trace = dict[str, Any]
MOST_POINTS: Final = 200
MOST_LINES: Final = 8
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")


@dataclass(frozen=True, kw_only=True)
class View:
    """One way to draw a figure; with several, the reader chooses by their labels."""

    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What is drawn, said, read aloud (`alt`) and tabulated. A column's name carries its unit."""

    title: str
    sentence: str
    alt: str
    columns: list[str]
    rows: list[list[Any]]
    views: list[View]
    height: int = 380


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that stands in the page as it is. Rows whose number is in `marked` are highlighted."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    sentence: str = ""
    marked: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A chapter of the page: words, tables, figures, and tables that close it. `items` are verdicts under their headings."""

    title: str
    lead: list[str] = field(default_factory=list)
    items: list[tuple[str, list[str]]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    closing: list[Table] = field(default_factory=list)


def plain(text: object) -> str:
    """A text that plotly.js shows as it is."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def thin(points: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most `most` of them, evenly, the first and the last included."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def line(
    name: str,
    x: Sequence[Any],
    y: Sequence[float | None],
    *,
    series: int = 0,
    ramp: float | None = None,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    text: Sequence[str] | None = None,
    predicted: Sequence[bool] | None = None,
    mode: str = "lines+markers",
    hover: str = "%{y:.3g}",
    **more: Any,
) -> Trace:
    """A line with markers; with `low` and `high` it has error bars. Predicted points are open."""
    marks = [f"{_symbol(series)}-open" if open_ else _symbol(series) for open_ in predicted or []]
    trace: Trace = {
        "type": "scatter",
        "mode": mode,
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "meta": {"series": series, "ramp": ramp, "role": "line"},
        "marker": {"symbol": marks or _symbol(series)},
        "hovertemplate": f"{hover}<extra>{'%{fullData.name}' if name else ''}</extra>",
    }
    if low is not None and high is not None:
        up = [h - v for h, v in zip(high, y, strict=True) if v is not None]
        down = [v - b for b, v in zip(low, y, strict=True) if v is not None]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5, "width": 4}
    if text is not None:
        trace["text"] = [plain(one) for one in text]
    return trace | more


def band(x: Sequence[Any], low: Sequence[float], high: Sequence[float], *, series: int = 0, ramp: float | None = None) -> Trace:
    """An area between two lines, under the line of the same series."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"series": series, "ramp": ramp, "role": "band"},
    }


def guide(name: str, x: Sequence[Any], y: Sequence[float]) -> Trace:
    """A line to compare with: an ideal, a limit."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(name),
        "x": list(x),
        "y": list(y),
        "hoverinfo": "skip",
        "meta": {"role": "guide"},
    }


def boxes(name: str, labels: Sequence[Any], samples: Sequence[Sequence[float]], *, series: int = 0) -> Trace:
    """A box for each label: quartiles, whiskers at the 5th and 95th percentile. Only these five numbers go into the page."""
    cuts = [[quantile(values, q) for values in samples] for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
    keys = ("lowerfence", "q1", "median", "q3", "upperfence")
    return {
        "type": "box",
        "name": plain(name),
        "x": [plain(one) for one in labels],
        **dict(zip(keys, cuts, strict=True)),
        "meta": {"series": series, "role": "box"},
    }


def quantile(values: Sequence[float], q: float) -> float:
    """By linear interpolation."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def axes(x: str, y: str, **more: Mapping[str, Any]) -> dict[str, Any]:
    """A layout with two named axes; `xaxis` and `yaxis` in `more` are added to them."""
    rest = {key: value for key, value in more.items() if key not in ("xaxis", "yaxis")}
    return {
        "xaxis": {"title": {"text": plain(x)}, **more.get("xaxis", {})},
        "yaxis": {"title": {"text": plain(y)}, **more.get("yaxis", {})},
        **rest,
    }


def rank_axis(ranks: Sequence[int]) -> dict[str, Any]:
    """A logarithmic axis with a tick at every number of ranks, as far as they fit."""
    shown = thin(sorted(set(ranks)), 12)
    return {"type": "log", "tickvals": shown, "ticktext": [f"{rank:,}" for rank in shown]}


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, or at powers of ten where there are many."""
    known = [value for value in values if value > 0] or [1.0]
    least, most = floor(log10(min(known))), ceil(log10(max(known)))
    steps = (1, 2, 5) if most - least <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(least, most + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}


def doublings(most: float) -> dict[str, Any]:
    """A logarithmic axis for speedups: ticks at powers of two, or of ten where there are many."""
    ticks = [2.0**power for power in range(-4, ceil(log2(max(most, 2))) + 1)]
    return (
        {"type": "log", "tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}
        if most <= 600
        else {"type": "log", "dtick": 1}
    )


def categories() -> dict[str, Any]:
    """An axis of names; without its type, plotly.js would take the name `1` for a number."""
    return {"type": "category", "automargin": True}


def ramp_at(index: int, many: int) -> float | None:
    """Where on the ramp a line of an ordered family lies; None where colours of their own suffice."""
    return index / (many - 1) if many > 4 else None


def _symbol(series: int) -> str:
    return _SYMBOLS[series % len(_SYMBOLS)]
