"""Where the time goes: seconds per phase over ranks (the paper's figures 5, 7, 9) and each phase's share (6, 8, 10).

phase_figures(experiment)
"""

from collections.abc import Sequence
from statistics import median

from deepex.record import COMPUTE, PHASES
from deepex.report.bars import Bars, bar_view
from deepex.report.collect import Run
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, line, log_axis, rank_axis, thin
from deepex.report.words import count, listed, seconds, share

_MOST_GROUPS = 24


def phase_figures(experiment: Experiment) -> list[Figure]:
    """Over ranks where ranks vary; else by setting; of a run alone over its epochs."""
    groups = [group for group in experiment.groups if all(run.has_phases for run in group.runs)]
    if not groups:
        return []
    ladders = experiment.ladders()
    if experiment.kind in ("strong", "weak") and len({group.ranks for group in groups}) > 1:
        rungs = next(iter(ladders.values())) if experiment.kind == "strong" and ladders else sorted(groups, key=lambda g: g.ranks)
        return [_lines(rungs, strong=experiment.kind == "strong"), _shares(rungs, [f"{group.ranks:,}" for group in rungs], "ranks")]
    if len(groups) > 1:
        shown = thin(sorted(groups, key=lambda group: median(map(median, group.seconds))), _MOST_GROUPS)
        return [_shares(shown, [group.label for group in shown], "setting, the fastest first")]
    return [_over_epochs(groups[0].runs[0])]


def phase_seconds(group: Group, phase: str) -> float:
    """Median over repeats of the median over steady epochs of the mean over ranks."""
    return median(median(epoch.phase_seconds(phase) for epoch in run.steady) for run in group.runs)


def _lines(rungs: Sequence[Group], *, strong: bool) -> Figure:
    ranks = [group.ranks for group in rungs]
    table = {name: [phase_seconds(group, name) for group in rungs] for name in PHASES}
    traces = [
        line(name, ranks, [value or None for value in table[name]], series=i, hover="%{x} ranks: %{y:.3g} s")
        for i, name in enumerate(PHASES)
    ]
    every = [value for values in table.values() for value in values]
    first, last = rungs[0], rungs[-1]
    compute = [sum(table[name][at] for name in COMPUTE) for at in (0, -1)]
    fell = compute[0] / compute[-1] if compute[-1] else 0.0
    falls = f"goes from {seconds(compute[0])} to {seconds(compute[1])}"
    if strong:
        falls += f" ({fell:.3g} times less; ideal {last.ranks / first.ranks:.3g})"
    sync = table["sync"]
    crossing = next((rank for rank, t, *c in zip(ranks, sync, *(table[n] for n in COMPUTE), strict=True) if t > sum(c)), None)
    sentence = (
        f"From {first.ranks:,} to {count(last.ranks, 'rank')} compute {falls} "
        f"and sync goes from {seconds(sync[0])} to {seconds(sync[-1])}. "
        + (
            f"Sync takes longer than compute from {count(crossing, 'rank')} on."
            if crossing
            else "Compute outweighs sync throughout."
        )
    )
    return Figure(
        title="Time per phase over ranks",
        sentence=sentence,
        alt=f"Log-log line chart of seconds per epoch in each of the five phases over ranks. {sentence}",
        columns=["ranks", *(f"{name} (s)" for name in PHASES), "epoch (s)"],
        rows=[
            [group.ranks, *(table[name][at] for name in PHASES), median(map(median, group.seconds))]
            for at, group in enumerate(rungs)
        ],
        views=[View(traces=traces, layout=axes("ranks", "seconds per epoch", xaxis=rank_axis(ranks), yaxis=log_axis(every)))],
    )


def _shares(groups: Sequence[Group], labels: Sequence[str], axis: str) -> Figure:
    table = [{name: phase_seconds(group, name) for name in PHASES} for group in groups]
    totals = [sum(row.values()) or 1.0 for row in table]
    rows = [
        Bars(name=name, values=[row[name] / total for row, total in zip(table, totals, strict=True)], series=i)
        for i, name in enumerate(PHASES)
    ]
    view, height = bar_view(labels, rows, axis="share of the time", names=axis, form=".1~%", stack=True)
    largest = [max(PHASES, key=lambda name, row=row: row[name]) for row in table]  # type: ignore[misc]
    first, last = (f"{name} rank{'' if name == '1' else 's'}" if axis == "ranks" else name for name in (labels[0], labels[-1]))
    sync, fed = ([share(row[phase] / total) for row, total in zip(table, totals, strict=True)] for phase in ("sync", "input"))
    sentence = (
        f"Sync takes {sync[0]} of the time with {first} and {sync[-1]} with {last}; input {fed[0]} and {fed[-1]}. "
        f"The largest phase is {listed(sorted(set(largest)))}."
    )
    return Figure(
        title="Share of each phase in the epoch",
        sentence=sentence,
        alt=f"Stacked bars of each phase's share of the epoch. {sentence}",
        columns=[axis, *PHASES],
        rows=[[name, *(row[phase] / total for phase in PHASES)] for name, row, total in zip(labels, table, totals, strict=True)],
        views=[view],
        height=height,
    )


def _over_epochs(run: Run) -> Figure:
    epochs = thin([epoch for epoch in run.epochs if not epoch.partial])
    rows = [Bars(name=name, values=[epoch.phase_seconds(name) for epoch in epochs], series=i) for i, name in enumerate(PHASES)]
    view, height = bar_view(
        [str(e.epoch) for e in epochs], rows, axis="seconds, mean of ranks", names="epoch", unit=" s", stack=True
    )
    usual = {name: median(epoch.phase_seconds(name) for epoch in run.steady) for name in PHASES}
    total = sum(usual.values()) or 1.0
    parts = [f"{name} {share(usual[name] / total)}" for name in sorted(PHASES, key=lambda name: -usual[name])]
    takes = seconds(median(epoch.seconds for epoch in run.steady))
    sentence = f"A steady epoch takes {takes} on {count(run.ranks, 'rank')}: {', '.join(parts)}."
    return Figure(
        title="Time per phase over epochs",
        sentence=sentence,
        alt=f"Stacked bars of seconds per phase, mean of ranks, for {count(len(epochs), 'epoch')}. {sentence}",
        columns=["epoch", *(f"{name} (s)" for name in PHASES), "epoch takes (s)"],
        rows=[[epoch.epoch, *(epoch.phase_seconds(name) for name in PHASES), epoch.seconds] for epoch in epochs],
        views=[view],
        height=height,
    )
