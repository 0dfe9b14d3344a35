"""Settings compared by the time of an epoch and by what was learnt: for runs that differ in anything but ranks.

setting_figures(experiment)
"""

from collections.abc import Mapping, Sequence
from statistics import median

from deepex.report.bars import Bars, bar_view
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, boxes, categories
from deepex.report.words import count, fast, seconds
from deepex.speedup.statistics import Groups, middle, ratio

_MOST = 30


def setting_figures(experiment: Experiment) -> list[Figure]:
    """A point with its interval for each setting; more than fit are shown as one distribution."""
    groups = sorted(experiment.groups, key=lambda group: _median(group.seconds))
    if len(groups) < 2:
        return []
    return [_points(groups) if len(groups) <= _MOST else _distribution(groups)]


def fastest(groups: Sequence[Group]) -> str:
    """Which setting has the shortest epoch, and what it gains on others."""
    best = min(groups, key=lambda group: _median(group.seconds))
    gained = against(best.seconds, {group.label: group.seconds for group in groups if group is not best})
    return f"{best.label} has the shortest epoch of {len(groups):,}, {seconds(_median(best.seconds))}{gained}."


def against(best: Groups, others: Mapping[str, Groups]) -> str:
    """What the best gains on the next and on the slowest of the others: the rest of a sentence."""
    ordered = sorted(others, key=lambda name: _median(others[name]))
    places = {ordered[-1]: "the slowest", ordered[0]: "the next"} if len(ordered) > 1 else dict.fromkeys(ordered, "the other")
    return "".join(f"; against {name}, {places[name]}: {fast(ratio(others[name], best))}" for name in ordered if name in places)


def _median(times: Groups) -> float:
    return median(map(median, times))


def _points(groups: Sequence[Group]) -> Figure:
    found = [middle(group.seconds) for group in groups]
    labels = [group.label for group in groups]
    sentence = fastest(groups)
    row = Bars(name="", values=[one.value for one in found], intervals=found)
    view, height = bar_view(labels, [row], axis="seconds per epoch", unit=" s", points=True)
    return Figure(
        title="Seconds per epoch by setting",
        sentence=sentence,
        alt=f"Points with intervals for {len(groups)} settings, the fastest first. {sentence}",
        columns=["setting", "seconds per epoch", "low", "high", "repeats"],
        rows=[[name, one.value, one.low, one.high, one.repeats] for name, one in zip(labels, found, strict=True)],
        views=[view],
        height=height,
    )


def _distribution(groups: Sequence[Group]) -> Figure:
    times = [_median(group.seconds) for group in groups]
    by_ranks: dict[int, list[float]] = {}
    for group, value in zip(groups, times, strict=True):
        by_ranks.setdefault(group.ranks, []).append(value)
    ranks = sorted(by_ranks)
    box = boxes("", [count(rank, "rank") for rank in ranks], [by_ranks[rank] for rank in ranks])
    sentence = f"{fastest(groups)} Boxes hold the middle half of {len(groups):,} settings."
    return Figure(
        title="Seconds per epoch over all settings",
        sentence=sentence,
        alt=f"Box chart, a box for each number of ranks. {sentence}",
        columns=["setting", "seconds per epoch (median)", "repeats"],
        rows=[[group.label, value, len(group.runs)] for group, value in zip(groups, times, strict=True)],
        views=[View(traces=[box], layout=axes("", "seconds per epoch", xaxis=categories(), yaxis={"rangemode": "tozero"}))],
    )
