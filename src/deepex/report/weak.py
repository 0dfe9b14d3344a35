"""Weak scaling: as much work for each rank, more ranks. Efficiency is what is left of the samples per second of one rank.

weak_figures(experiment)
"""

from collections.abc import Sequence
from statistics import median

from deepex.record.measure import Measure
from deepex.report.convergence import score_text
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, guide, line, rank_axis
from deepex.report.words import count, share, within
from deepex.speedup.statistics import Interval, ratio


def weak_figures(experiment: Experiment) -> list[Figure]:
    """Efficiency over ranks, and the validation measure after equally many epochs."""
    rungs = sorted(experiment.groups, key=lambda group: group.ranks)
    if len({group.ranks for group in rungs}) < 2:
        return []
    equal = _at_equal_epochs(rungs, experiment.measure)
    return [_efficiency(rungs), *([equal] if equal else [])]


def weak_efficiency(base: Group, group: Group) -> Interval:
    """Samples per second and rank, against the base's."""
    return ratio(_seconds_per_sample(base), _seconds_per_sample(group))


def _seconds_per_sample(group: Group) -> list[list[float]]:
    return [[epoch.seconds * epoch.ranks / max(epoch.samples, 1) for epoch in run.steady] for run in group.runs]


def _efficiency(rungs: Sequence[Group]) -> Figure:
    base, ranks = rungs[0], [group.ranks for group in rungs]
    values = [weak_efficiency(base, group) for group in rungs[1:]]
    trace = line(
        "weak efficiency",
        ranks,
        [1.0, *(value.value for value in values)],
        low=[1.0, *(value.low for value in values)],
        high=[1.0, *(value.high for value in values)],
        predicted=[not group.measured for group in rungs],
        text=[group.label for group in rungs],
        hover="%{text}: %{y:.0%}",
    )
    last = values[-1]
    sentence = (
        f"With equal work for each rank, {count(ranks[-1], 'rank')} keep {share(last.value)} of the rate of {ranks[0]} "
        f"{within(last, share)}."
    )
    layout = axes("ranks", "weak efficiency", xaxis=rank_axis(ranks), yaxis={"tickformat": ".0%", "rangemode": "tozero"})
    return Figure(
        title="Weak efficiency over ranks",
        sentence=sentence,
        alt=f"Line chart of weak efficiency over ranks. {sentence}",
        columns=["setting", "ranks", "weak efficiency", "low", "high"],
        rows=[[base.label, base.ranks, 1.0, 1.0, 1.0]]
        + [[g.label, g.ranks, v.value, v.low, v.high] for g, v in zip(rungs[1:], values, strict=True)],
        views=[View(traces=[guide("ideal", [ranks[0], ranks[-1]], [1.0, 1.0]), trace], layout=layout)],
        height=320,
    )


def _at_equal_epochs(rungs: Sequence[Group], measure: Measure) -> Figure | None:
    common = min(run.epochs[-1].epoch for group in rungs for run in group.runs)
    scores = [
        [
            value
            for run in group.runs
            for e in run.epochs
            if e.epoch == common and (value := e.score("validation", measure.name)) is not None
        ]
        for group in rungs
    ]
    if not all(scores):
        return None
    ranks, middles = [group.ranks for group in rungs], [median(values) for values in scores]
    trace = line(
        f"validation {measure.name}",
        ranks,
        middles,
        low=[min(values) for values in scores],
        high=[max(values) for values in scores],
        series=1,
        hover="%{x} ranks: %{y:.4g}",
    )
    sentence = (
        f"After {count(common, 'epoch')} the validation {measure.name} is {score_text(measure, middles[0])} on "
        f"{count(ranks[0], 'rank')} and {score_text(measure, middles[-1])} on {ranks[-1]:,}; bars reach over all repeats."
    )
    form = {"rangemode": "tozero", **({"tickformat": ".2~%"} if measure.is_share else {})}
    return Figure(
        title=f"Validation {measure.name} after equally many epochs",
        sentence=sentence,
        alt=f"Line chart of the validation {measure.name} over ranks. {sentence}",
        columns=["ranks", f"validation {measure.name} (median)", "least", "greatest", "repeats"],
        rows=[[r, m, min(v), max(v), len(v)] for r, m, v in zip(ranks, middles, scores, strict=True)],
        views=[View(traces=[trace], layout=axes("ranks", measure.name, xaxis=rank_axis(ranks), yaxis=form))],
        height=320,
    )
