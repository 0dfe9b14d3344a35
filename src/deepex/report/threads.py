"""Threads × ranks as heat maps, one for each choice of kernels; the best setting is named.

thread_figures(experiment)
"""

from collections.abc import Sequence
from statistics import median

from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, categories, plain
from deepex.report.words import count, number, seconds, within
from deepex.speedup.statistics import middle, ratio


def thread_figures(experiment: Experiment) -> list[Figure]:
    """Seconds per epoch over threads and ranks."""
    groups = [group for group in experiment.groups if "threads" in group.varied]
    kernels: dict[str, list[Group]] = {}
    for group in groups:
        kernels.setdefault(_kernels(group), []).append(group)
    if len(groups) < 2:
        return []
    best = min(groups, key=_seconds)
    ordered = sorted(kernels.items(), key=lambda item: min(map(_seconds, item[1])))
    return [_map(name, members, best, groups) for name, members in ordered]


def _map(name: str, groups: Sequence[Group], best: Group, everyone: Sequence[Group]) -> Figure:
    threads = sorted({group.varied["threads"] for group in groups})
    ranks = sorted({group.ranks for group in groups})
    found = {(group.varied["threads"], group.ranks): _seconds(group) for group in groups}
    grid = [[found.get((t, r)) for t in threads] for r in ranks]
    here = min(groups, key=_seconds)
    trace = {
        "type": "heatmap",
        "x": [str(t) for t in threads],
        "y": [str(r) for r in ranks],
        "z": grid,
        "text": [["" if value is None else number(value) for value in row] for row in grid],
        "texttemplate": "%{text}",
        "hovertemplate": "%{x} threads × %{y} ranks: %{z:.3g} s<extra></extra>",
        "zmin": _seconds(best),  # as in the other maps, so that colours can be compared
        "zmax": max(map(_seconds, everyone)),
        "colorbar": {"title": {"text": "s"}, "thickness": 12},
        "meta": {"role": "heat"},
    }
    star = {
        "type": "scatter",
        "mode": "markers",
        "x": [str(here.varied["threads"])],
        "y": [str(here.ranks)],
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"role": "ring"},
    }
    least = middle(here.seconds)
    gained = ratio(here.seconds, best.seconds)
    rest = (
        f"It is the best of all {len(everyone)} settings."
        if here is best
        else f"The best of all settings is {number(gained.value)} times as fast {within(gained)}."
    )
    title = f"Threads × ranks{': ' + name if name else ''}"
    head = f"{name[:1].upper()}{name[1:]}: " if name else ""
    sentence = f"{head}the shortest epoch is {seconds(least.value)} {within(least, seconds)}, with {_words(here)}. {rest}"
    return Figure(
        title=title,
        sentence=sentence,
        alt=f"Heat map of seconds per epoch over {len(threads)} numbers of threads and {len(ranks)} of ranks. {sentence}",
        columns=["threads", "ranks", "seconds per epoch"],
        rows=[[t, r, value] for (t, r), value in sorted(found.items())],
        views=[View(traces=[trace, star], layout=axes(plain("threads per rank"), "ranks", xaxis=categories(), yaxis=categories()))],
        height=300,
    )


def _kernels(group: Group) -> str:
    parts = []
    if "onednn" in group.varied:
        parts.append("oneDNN" if group.varied["onednn"] else "without oneDNN")
    if "layout" in group.varied:
        parts.append(str(group.varied["layout"]).replace("_", " "))
    return ", ".join(parts)


def _words(group: Group) -> str:
    threads = count(int(group.varied["threads"]), "thread")
    return f"{threads} on one rank" if group.ranks == 1 else f"{threads} on each of {group.ranks:,} ranks"


def _seconds(group: Group) -> float:
    return median(map(median, group.seconds))
