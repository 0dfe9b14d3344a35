"""Settings compared by the time of an epoch and by what was learnt: for runs that differ in anything but ranks.

setting_figures(experiment)
"""

from collections.abc import Sequence
from statistics import median

from deepex.report.bars import Bars, bar_view
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, boxes, categories
from deepex.report.words import count, fast, seconds
from deepex.speedup.statistics import Interval, middle, ratio

_MOST = 30


def setting_figures(experiment: Experiment) -> list[Figure]:
    """A point with its interval for each setting; more than fit are shown as one distribution."""
    groups = sorted(experiment.groups, key=lambda group: median(map(median, group.seconds)))
    if len(groups) < 2:
        return []
    return [_points(groups) if len(groups) <= _MOST else _distribution(groups)]


def compared(groups: Sequence[Group]) -> tuple[Group, Group, Interval]:
    """The fastest and the slowest setting, and their ratio."""
    ordered = sorted(groups, key=lambda group: median(map(median, group.seconds)))
    return ordered[0], ordered[-1], ratio(ordered[-1].seconds, ordered[0].seconds)


def _points(groups: Sequence[Group]) -> Figure:
    found = [middle(group.seconds) for group in groups]
    labels = [group.label for group in groups]
    sentence = _sentence(groups)
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
    times = [median(map(median, group.seconds)) for group in groups]
    by_ranks: dict[int, list[float]] = {}
    for group, value in zip(groups, times, strict=True):
        by_ranks.setdefault(group.ranks, []).append(value)
    ranks = sorted(by_ranks)
    box = boxes("", [count(rank, "rank") for rank in ranks], [by_ranks[rank] for rank in ranks])
    sentence = f"{_sentence(groups)} Boxes hold the middle half of {len(groups):,} settings."
    return Figure(
        title="Seconds per epoch over all settings",
        sentence=sentence,
        alt=f"Box chart, a box for each number of ranks. {sentence}",
        columns=["setting", "seconds per epoch (median)", "repeats"],
        rows=[[group.label, value, len(group.runs)] for group, value in zip(groups, times, strict=True)],
        views=[View(traces=[box], layout=axes("", "seconds per epoch", xaxis=categories(), yaxis={"rangemode": "tozero"}))],
    )


def _sentence(groups: Sequence[Group]) -> str:
    quick, slow, gained = compared(groups)
    return (
        f"{quick.label} has the shortest epoch, {seconds(median(map(median, quick.seconds)))}; "
        f"against {slow.label}, the longest, it is {fast(gained)}."
    )
