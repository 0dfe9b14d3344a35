"""How runs learn: the measure over epochs and over seconds (the paper's figures 11 and 12), training beside validation (14).

    convergence_figures(experiment)

A line is the median over repeats, its band reaches from the least to the greatest (from the 10th to the 90th percentile where there
are more than ten). Too many groups for lines are drawn as one distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from deepex.record.measure import Measure
from deepex.report.collect import Run
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import MOST_LINES, Figure, Trace, View, axes, band, line, quantile, ramp_at, thin
from deepex.report.words import count, listed, number, seconds


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A measure over epochs: median, band, and the seconds that had passed."""

    name: str
    epochs: list[int]
    passed: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]
    runs: int
    measured: bool


def convergence_figures(experiment: Experiment) -> list[Figure]:
    """Training by group; then training and validation together for the group with the most ranks."""
    measure = experiment.measure
    groups = sorted(experiment.groups, key=lambda group: group.ranks)
    if len(groups) > MOST_LINES:
        groups = [Group(varied={}, runs=experiment.runs)]
    name = experiment.runs[0].name if len(experiment.runs) == 1 else f"all {count(len(experiment.runs), 'run')}"
    curves = [found for g in groups if (found := curve(g.label or name, g.runs, "train", measure)) is not None]
    if not curves or max(len(one.epochs) for one in curves) < 2:
        return []
    both = _both(experiment, measure)
    return [_by_group(curves, measure, ordered=bool(experiment.ladders())), *([both] if both else [])]


def curve(name: str, runs: Sequence[Run], part: str, measure: Measure) -> Curve | None:
    """The median course of some runs, over the epochs that more than half of them have."""
    values: dict[int, list[float]] = {}
    passed: dict[int, list[float]] = {}
    for run in runs:
        usual = median(epoch.seconds for epoch in run.steady)
        clock = accumulate(usual if epoch.partial else epoch.seconds for epoch in run.epochs)
        for epoch, so_far in zip(run.epochs, clock, strict=True):
            value = epoch.score(part, measure.name)
            if value is not None:
                values.setdefault(epoch.epoch, []).append(value)
                passed.setdefault(epoch.epoch, []).append(so_far)
    epochs = thin([epoch for epoch in sorted(values) if len(values[epoch]) > len(runs) / 2])
    if not epochs:
        return None
    edge = 0.1 if len(runs) > 10 else 0.0
    return Curve(
        name=name,
        epochs=epochs,
        passed=[median(passed[epoch]) for epoch in epochs],
        middle=[median(values[epoch]) for epoch in epochs],
        low=[quantile(values[epoch], edge) for epoch in epochs],
        high=[quantile(values[epoch], 1 - edge) for epoch in epochs],
        runs=len(runs),
        measured=all(run.measured for run in runs),
    )


def traces(curves: Sequence[Curve], *, over: str, ordered: bool = False) -> list[Trace]:
    """Bands, then lines, over `epochs` or `seconds`; a family in an order has colours in that order."""
    drawn = []
    for i, one in enumerate(curves):
        x = one.epochs if over == "epochs" else one.passed
        ramp = ramp_at(i, len(curves)) if ordered else None
        if one.runs > 1:
            drawn.append(band(x, one.low, one.high, series=i, ramp=ramp))
    for i, one in enumerate(curves):
        x = one.epochs if over == "epochs" else one.passed
        hover = "epoch %{x}: %{y:.4g}" if over == "epochs" else "%{x:.3g} s: %{y:.4g}"
        mode = "lines+markers" if len(x) <= 30 else "lines"
        style: dict[str, Any] = {} if one.measured else {"line": {"dash": "dash"}}
        name = one.name + ("" if one.measured else " (predicted)")
        drawn.append(
            line(name, x, one.middle, series=i, ramp=ramp_at(i, len(curves)) if ordered else None, mode=mode, hover=hover, **style)
        )
    return drawn


def score_text(measure: Measure, value: float) -> str:
    """A share in per cent, anything else as a number with its unit."""
    return f"{100 * value:.3g}\u00a0%" if measure.is_share else f"{number(value)} {measure.unit}".strip()


def _by_group(curves: Sequence[Curve], measure: Measure, *, ordered: bool) -> Figure:
    last = [
        f"{score_text(measure, one.middle[-1])} for {one.name} (epoch {one.epochs[-1]}, {seconds(one.passed[-1])})"
        for one in curves
    ]
    repeats = {one.runs for one in curves}
    spread = (
        ""
        if repeats == {1}
        else " Lines are medians over repeats, bands reach over "
        + ("the 10th to the 90th percentile." if max(repeats) > 10 else "all of them.")
    )
    sentence = f"The training {measure.title} ends at {listed(last)}.{spread}"
    return Figure(
        title=f"Convergence: training {measure.title}",
        sentence=sentence,
        alt=f"Line chart of the training {measure.title}, a line for each of {listed(one.name for one in curves)}. {sentence}",
        columns=["runs", "epoch", "seconds passed", f"{measure.name} (median)", "low", "high", "repeats"],
        rows=_rows(curves),
        views=[
            View(label="over epochs", traces=traces(curves, over="epochs", ordered=ordered), layout=_axes("epoch", measure)),
            View(
                label="over seconds",
                traces=traces(curves, over="seconds", ordered=ordered),
                layout=_axes("seconds of training", measure),
            ),
        ],
    )


def _both(experiment: Experiment, measure: Measure) -> Figure | None:
    group = max(experiment.groups, key=lambda group: (group.ranks, len(group.runs)))
    curves = [one for part in ("train", "validation") if (one := curve(_part(part), group.runs, part, measure)) is not None]
    if len(curves) < 2:
        return None
    train, held = curves
    best = min(range(len(held.middle)), key=held.middle.__getitem__)
    gap = held.middle[-1] - train.middle[-1]
    apart = f"{100 * abs(gap):.2g} percentage points" if measure.is_share else number(abs(gap))
    sentence = (
        f"With {group.label or count(group.ranks, 'rank')} the validation {measure.title} is lowest in epoch {held.epochs[best]} "
        f"({score_text(measure, held.middle[best])}) and ends at {score_text(measure, held.middle[-1])}, "
        f"{apart} {'above' if gap >= 0 else 'below'} the training {measure.title}."
    )
    return Figure(
        title=f"Training and validation {measure.title}",
        sentence=sentence,
        alt=f"Two lines over epochs: training and validation {measure.title}. {sentence}",
        columns=["part", "epoch", "seconds passed", f"{measure.name} (median)", "low", "high", "repeats"],
        rows=_rows(curves),
        views=[View(traces=traces(curves, over="epochs"), layout=_axes("epoch", measure))],
        height=320,
    )


def _rows(curves: Sequence[Curve]) -> list[list[object]]:
    return [
        [one.name, *row, one.runs]
        for one in curves
        for row in zip(one.epochs, one.passed, one.middle, one.low, one.high, strict=True)
    ]


def _part(part: str) -> str:
    return "training" if part == "train" else part


def _axes(x: str, measure: Measure) -> dict[str, object]:
    form = {"tickformat": ".2~%"} if measure.is_share else {}
    return axes(x, measure.title, yaxis={"rangemode": "tozero", **form})
