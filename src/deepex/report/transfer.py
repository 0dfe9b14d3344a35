"""What it costs to move bytes: bandwidth and time over message size, a line for each path.

transfer_figures([{"path": "rank-rank mpi", "bytes": 1024, "seconds": [2e-6, 2.1e-6], …}, …])
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from deepex.report.figure import MOST_LINES, Figure, Table, Trace, View, axes, line, ramp_at, thin
from deepex.report.words import listed, seconds, share, size

_Lines = dict[str, list[tuple[int, list[float]]]]  # of each path: bytes, and the seconds of every repeat
_Kinds = dict[str, list[str]]  # which paths are of a kind
_Point = tuple[int, float, float, float, int]  # bytes, median, least, greatest, repeats


def transfer_figures(tables: Sequence[dict[str, Any]]) -> list[Figure]:
    """What was measured in several runs is put together; tables without bytes or seconds are left out: a path may have failed."""
    found: dict[str, dict[int, list[float]]] = {}
    kinds: dict[str, list[str]] = {}
    for table in tables:
        times = [float(value) for value in table.get("seconds") or [] if value > 0]
        if times and table.get("bytes"):
            path, kind = str(table.get("path")), str(table.get("kind") or "other")
            found.setdefault(path, {}).setdefault(int(table["bytes"]), []).extend(times)
            kinds.setdefault(kind, [])
            kinds[kind] += [path] if path not in kinds[kind] else []
    lines = {path: sorted(points.items()) for path, points in found.items()}
    return [_bandwidth(lines, kinds), _time(lines, kinds)] if lines else []


def transfer_table(tables: Sequence[dict[str, Any]]) -> Table | None:
    """Latency and bandwidth of each path: medians over runs of the lines that were fitted."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        if isinstance(table.get("fit"), dict):
            found.setdefault(str(table.get("path")), []).append(table)
    if not found:
        return None
    return Table(
        title="Latency and bandwidth of each path",
        sentence="The line through the medians of all sizes that fits best: time = latency + bytes / bandwidth. Where a point is "
        "far from it, caches or protocols change with size: see the figure.",
        columns=["path", "latency", "bandwidth", "farthest point off the line", "note"],
        rows=[[path, *_line(fits)] for path, fits in found.items()],
    )


def _line(tables: Sequence[dict[str, Any]]) -> tuple[str, str, str, str]:
    latency, off = (median(float(table["fit"][key]) for table in tables) for key in ("latency_seconds", "worst_deviation"))
    rates = [table["fit"]["bandwidth_bytes_per_second"] for table in tables]
    rate = "no limit seen" if None in rates else f"{size(median(rates))}/s"
    return seconds(latency), rate, share(off), str(tables[0].get("note") or "")


def _bandwidth(lines: _Lines, kinds: _Kinds) -> Figure:
    best = {path: max((many / median(times), many) for many, times in points) for path, points in lines.items()}
    order = sorted((max(paths, key=lambda path: best[path]) for paths in kinds.values()), key=lambda path: -best[path][0])
    sentence = "The highest bandwidth is " + listed(f"{size(best[p][0])}/s on {p} (at {size(best[p][1])})" for p in order) + "."
    return _figure(
        "Bandwidth over message size",
        sentence,
        lines,
        kinds,
        lambda many, value: many / value,
        y="bytes per second",
        hover="%{x:.3s}B: %{y:.3s}B/s",
    )


def _time(lines: _Lines, kinds: _Kinds) -> Figure:
    least = {path: (median(points[0][1]), points[0][0]) for path, points in lines.items()}
    order = sorted((min(paths, key=lambda path: least[path]) for paths in kinds.values()), key=lambda path: least[path])
    sentence = "The smallest message takes " + listed(f"{seconds(least[p][0])} on {p} ({size(least[p][1])})" for p in order) + "."
    hover = "%{x:.3s}B: %{y:.3s}s"
    return _figure("Time over message size", sentence, lines, kinds, lambda _many, value: value, y="seconds", hover=hover)


def _figure(
    title: str, sentence: str, lines: _Lines, kinds: _Kinds, value: Callable[[int, float], float], *, y: str, hover: str
) -> Figure:
    """A view for each kind of path: many lines that overlap would tell nothing."""

    def point(many: int, times: list[float]) -> _Point:
        low, high = sorted((value(many, min(times)), value(many, max(times))))
        return many, value(many, median(times)), low, high, len(times)

    table = {path: [point(many, times) for many, times in points] for path, points in lines.items()}
    log = {"type": "log", "exponentformat": "SI"}
    layout = axes("bytes per message", y, xaxis=log, yaxis=log)
    views = [View(label=kind, traces=_traces({p: table[p] for p in paths}, hover), layout=layout) for kind, paths in kinds.items()]
    return Figure(
        title=title,
        sentence=sentence + " Points are medians, bars reach over all repeats.",
        alt=f"Log-log line chart with a line for each of {listed(lines)}. {sentence}",
        columns=["path", "bytes", f"{y} (median)", "least", "greatest", "repeats"],
        rows=[[path, *point] for path, points in table.items() for point in points],
        views=views,
        height=420,
    )


def _traces(table: dict[str, list[_Point]], hover: str) -> list[Trace]:
    traces = []
    for i, (path, points) in enumerate(table.items()):
        many, middle, low, high, _ = zip(*thin(points), strict=True)
        ramp = ramp_at(i, len(table)) if len(table) > MOST_LINES else None
        traces.append(line(path, many, middle, low=low, high=high, series=i, ramp=ramp, hover=hover))
    return traces
