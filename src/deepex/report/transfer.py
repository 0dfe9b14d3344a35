"""What it costs to move bytes: bandwidth and time over message size, a line for each path.

transfer_figures([{"path": "rank-rank mpi", "bytes": 1024, "seconds": [2e-6, 2.1e-6], …}, …])
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from deepex.report.figure import MOST_LINES, Figure, View, axes, line, ramp_at, thin
from deepex.report.words import listed, seconds, size

_Lines = dict[str, list[tuple[int, list[float]]]]


def transfer_figures(tables: Sequence[dict[str, Any]]) -> list[Figure]:
    """What was measured in several runs is put together; tables without bytes or seconds are left out: a path may have failed."""
    found: dict[str, dict[int, list[float]]] = {}
    for table in tables:
        if table.get("seconds") and table.get("bytes"):
            times = [float(value) for value in table["seconds"] if value > 0]
            found.setdefault(str(table.get("path")), {}).setdefault(int(table["bytes"]), []).extend(times)
    known = {path: sorted((many, times) for many, times in points.items() if times) for path, points in found.items()}
    lines = {path: points for path, points in known.items() if points}
    return [_bandwidth(lines), _time(lines)] if lines else []


def _bandwidth(lines: _Lines) -> Figure:
    best = {path: max((many / median(times), many) for many, times in points) for path, points in lines.items()}
    order = sorted(best, key=lambda path: -best[path][0])
    sentence = "The highest bandwidth is " + listed(f"{size(best[p][0])}/s on {p} (at {size(best[p][1])})" for p in order) + "."
    return _figure(
        "Bandwidth over message size",
        sentence,
        lines,
        lambda many, value: many / value,
        y="bytes per second",
        hover="%{x:.3s}B: %{y:.3s}B/s",
    )


def _time(lines: _Lines) -> Figure:
    least = {path: (points[0][0], median(points[0][1])) for path, points in lines.items()}
    order = sorted(least, key=lambda path: least[path][1])
    sentence = "The smallest message takes " + listed(f"{seconds(least[p][1])} on {p} ({size(least[p][0])})" for p in order) + "."
    return _figure("Time over message size", sentence, lines, lambda _many, value: value, y="seconds", hover="%{x:.3s}B: %{y:.3s}s")


def _figure(title: str, sentence: str, lines: _Lines, value: Callable[[int, float], float], *, y: str, hover: str) -> Figure:
    traces, rows = [], []
    for i, (path, points) in enumerate(lines.items()):
        middle = [value(many, median(times)) for many, times in points]
        edges = [sorted((value(many, min(times)), value(many, max(times)))) for many, times in points]
        shown = thin(list(zip(points, middle, edges, strict=True)))
        ramp = ramp_at(i, len(lines)) if len(lines) > MOST_LINES else None
        traces.append(
            line(
                path,
                [point[0] for point, _, _ in shown],
                [m for _, m, _ in shown],
                low=[e[0] for _, _, e in shown],
                high=[e[1] for _, _, e in shown],
                series=i,
                ramp=ramp,
                hover=hover,
            )
        )
        rows += [[path, many, m, e[0], e[1], len(times)] for (many, times), m, e in zip(points, middle, edges, strict=True)]
    log = {"type": "log", "exponentformat": "SI"}
    return Figure(
        title=title,
        sentence=sentence + " Points are medians, bars reach over all repeats.",
        alt=f"Log-log line chart with a line for each of {listed(lines)}. {sentence}",
        columns=["path", "bytes", f"{y} (median)", "least", "greatest", "repeats"],
        rows=rows,
        views=[View(traces=traces, layout=axes("bytes per message", y, xaxis=log, yaxis=log))],
        height=420,
    )
