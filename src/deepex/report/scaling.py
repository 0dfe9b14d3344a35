"""Speedup and efficiency over ranks (the paper's figure 4), and learning speedup per cut-off (its figure 13).

scaling_figures(experiment, gains(experiment))
"""

from collections.abc import Sequence

from deepex.record import Target
from deepex.report.experiment import Experiment
from deepex.report.figure import Figure, Trace, View, axes, doublings, guide, line, rank_axis
from deepex.report.gain import Gain
from deepex.report.words import count, listed, number, share, within
from deepex.speedup.statistics import Interval


def scaling_figures(experiment: Experiment, gained: Sequence[Gain]) -> list[Figure]:
    """Nothing if no two groups differ in ranks alone."""
    if not gained:
        return []
    figures = [_speedup(gained), _efficiency(gained)]
    reached = [target for target in experiment.targets if any(gain.learning.get(target) for gain in gained)]
    return [*figures, _learning(reached, gained)] if reached else figures


def by_ladder(gained: Sequence[Gain]) -> dict[str, list[Gain]]:
    """The gains of each ladder, in order."""
    ladders: dict[str, list[Gain]] = {}
    for gain in gained:
        ladders.setdefault(gain.ladder, []).append(gain)
    return ladders


def points(name: str, gains: Sequence[Gain], values: Sequence[Interval], series: int, hover: str) -> Trace:
    """The base at 1 and a point with an interval for each gain."""
    base = gains[0].base
    return line(
        name,
        [base.ranks, *(gain.group.ranks for gain in gains)],
        [1.0, *(value.value for value in values)],
        low=[1.0, *(value.low for value in values)],
        high=[1.0, *(value.high for value in values)],
        predicted=[not base.measured, *(not gain.group.measured for gain in gains)],
        text=["base", *(within(value) + ("" if g.measured else " predicted") for g, value in zip(gains, values, strict=True))],
        series=series,
        hover=hover,
    )


def _speedup(gained: Sequence[Gain]) -> Figure:
    ladders = by_ladder(gained)
    ranks = sorted({rank for gain in gained for rank in (gain.base.ranks, gain.group.ranks)})
    base = gained[0].base.ranks
    hover = "%{x} ranks: %{y:.3g} times as fast %{text}"
    traces = [guide("ideal", ranks, [rank / base for rank in ranks])]
    traces += [
        points(name or "per-epoch speedup", rungs, [gain.per_epoch for gain in rungs], series, hover)
        for series, (name, rungs) in enumerate(ladders.items())
    ]
    best = max(gained, key=lambda gain: gain.per_epoch.value)
    sentence = (
        f"On {count(best.group.ranks, 'rank')} an epoch is {number(best.per_epoch.value)} times as fast as on {best.base.ranks} "
        f"{within(best.per_epoch)}, where the ideal is {number(best.group.ranks / best.base.ranks)}.{_predicted(gained)}"
    )
    return Figure(
        title="Per-epoch speedup over ranks",
        sentence=sentence,
        alt=f"Line chart of per-epoch speedup over {listed(f'{rank:,}' for rank in ranks)} ranks with the ideal line. {sentence}",
        columns=["setting", "ranks", "speedup", "low", "high", "ideal", "seconds per epoch are measured"],
        rows=[
            [
                g.ladder,
                g.group.ranks,
                g.per_epoch.value,
                g.per_epoch.low,
                g.per_epoch.high,
                g.group.ranks / g.base.ranks,
                g.measured,
            ]
            for g in gained
        ],
        views=[View(traces=traces, layout=_log_axes("per-epoch speedup", ranks))],
    )


def _efficiency(gained: Sequence[Gain]) -> Figure:
    ranks = sorted({rank for gain in gained for rank in (gain.base.ranks, gain.group.ranks)})
    hover = "%{x} ranks: %{y:.0%} of the ideal"
    traces = [guide("ideal", [ranks[0], ranks[-1]], [1.0, 1.0])]
    traces += [
        points(name or "efficiency", rungs, [gain.efficiency for gain in rungs], series, hover)
        for series, (name, rungs) in enumerate(by_ladder(gained).items())
    ]
    last = max(gained, key=lambda gain: gain.group.ranks)
    above = [gain for gain in gained if gain.efficiency.value >= 0.75]
    most = max((gain.group.ranks for gain in above), default=None)
    sentence = f"At {count(last.group.ranks, 'rank')} the efficiency is {share(last.efficiency.value)}; " + (
        f"it is 75 % or more up to {count(most, 'rank')}." if most else "nowhere beyond the base does it reach 75 %."
    )
    layout = axes("ranks", "efficiency", xaxis=rank_axis(ranks), yaxis={"tickformat": ".0%", "rangemode": "tozero"})
    return Figure(
        title="Parallel efficiency over ranks",
        sentence=sentence,
        alt=f"Line chart of parallel efficiency over ranks. {sentence}",
        columns=["setting", "ranks", "efficiency", "low", "high"],
        rows=[[g.ladder, g.group.ranks, g.efficiency.value, g.efficiency.low, g.efficiency.high] for g in gained],
        views=[View(traces=traces, layout=layout)],
        height=320,
    )


def _learning(targets: Sequence[Target], gained: Sequence[Gain]) -> Figure:
    ranks = sorted({rank for gain in gained for rank in (gain.base.ranks, gain.group.ranks)})
    traces: list[Trace] = []
    rows: list[list[object]] = []
    parts: list[str] = []
    for target in targets:
        for name, rungs in by_ladder(gained).items():
            reached = [(gain, value) for gain in rungs if (value := gain.learning.get(target)) is not None]
            if not reached:
                continue
            label = f"{name}: {target}" if name else str(target)
            found, values = zip(*reached, strict=True)
            hover = "%{x} ranks: learning speedup %{y:.3g} %{text}"
            traces.append(points(label, found, values, len(traces), hover))
            rows += [[label, gain.group.ranks, value.value, value.low, value.high, gain.measured] for gain, value in reached]
            best, value = max(reached, key=lambda item: item[1].value)
            parts.append(f"{number(value.value)} on {count(best.group.ranks, 'rank')} {within(value, repeats=False)} to {label}")
    sentence = f"The best learning speedup is {listed(parts)}.{_predicted(gained)}"
    return Figure(
        title="Learning speedup over ranks, by cut-off",
        sentence=sentence,
        alt=f"Line chart of learning speedup over ranks, a line for each cut-off. {sentence}",
        columns=["cut-off", "ranks", "learning speedup", "low", "high", "measured"],
        rows=rows,
        views=[View(traces=traces, layout=_log_axes("learning speedup", ranks))],
    )


def _predicted(gained: Sequence[Gain]) -> str:
    many = sum(not gain.measured for gain in gained)
    return f" Open symbols ({many} of {len(gained)}) are predicted, not measured." if many else ""


def _log_axes(name: str, ranks: Sequence[int]) -> dict[str, object]:
    return axes("ranks", name, xaxis=rank_axis(ranks), yaxis=doublings(ranks[-1] / ranks[0]))
