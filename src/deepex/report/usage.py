"""What ranks used: cores and GPU busy in each phase, memory, bytes moved, and energy, per epoch and to the target.

usage_figures(experiment)
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from deepex.record import PHASES, EpochRecord, Target
from deepex.report.bars import Bars, bar_view
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, Table, View
from deepex.report.words import listed, number, share, size

_BUSY: Final = {
    "cpu_seconds": ("Cores busy per rank, by phase", "cores busy"),
    "gpu_busy_seconds": ("GPU busy", "share of the time"),
}
_BYTES: Final = {
    "memory_bytes": "peak memory per rank",
    "gpu_memory_bytes": "peak GPU memory per rank",
    "read_bytes": "read per epoch",
    "written_bytes": "written per epoch",
    "network_bytes": "network per epoch",
    "joules": "energy per epoch",
}
_MOST: Final = 6
_LEAST_SHARE: Final = 0.002  # of the time that a phase must take


def usage_figures(experiment: Experiment) -> list[Figure]:
    """Whatever was measured; nothing where nothing was."""
    groups = _measured(experiment.groups)
    busy = [figure for resource in _BUSY if (figure := _busy(groups, resource)) is not None]
    energy = _energy(groups, experiment.targets)
    return [*busy, *([energy] if energy else [])]


def usage_table(experiment: Experiment) -> Table | None:
    """Bytes by group."""
    groups = _measured(experiment.groups)
    columns = [name for name in _BYTES if any(_bytes(group, name) is not None for group in groups)]
    if not columns:
        return None
    rows = [[group.label or "all runs", *(_amount(name, _bytes(group, name)) for name in columns)] for group in groups]
    return Table(
        title="Memory, bytes moved and energy",
        columns=["runs", *(_BYTES[name] for name in columns)],
        rows=rows,
        sentence="Peaks are the greatest of any rank; bytes moved and energy are sums over ranks in the median steady epoch.",
        folded=len(rows) > 12,
    )


def utilisation(epochs: Iterable[EpochRecord], resource: str) -> dict[str, float]:
    """Used seconds over seconds passed, all ranks together, for each phase; `epoch` where it cannot be told by phase.

    To an epoch belongs its validation then, which is sampled with it. A phase that takes next to no time is left out: what it used
    cannot be told from what its neighbours did.
    """
    used: dict[str, float] = {}
    passed: dict[str, float] = {}
    for epoch in epochs:
        for phase, values in epoch.usage.get(resource, {}).items():
            if phase in epoch.phases or phase == "epoch":
                used[phase] = used.get(phase, 0.0) + sum(values)
                passed[phase] = passed.get(phase, 0.0) + (_whole(epoch) if phase == "epoch" else sum(epoch.phases[phase]))
    least = _LEAST_SHARE * sum(passed.values())
    return {phase: used[phase] / passed[phase] for phase in used if passed[phase] > least}


def _whole(epoch: EpochRecord) -> float:
    """Seconds of all ranks, with those of validation."""
    held = epoch.validation.seconds if epoch.validation is not None else None
    return sum(epoch.wall) + epoch.ranks * (held or 0.0)


def joules(group: Group) -> list[list[float]] | None:
    """Energy of each steady epoch over all ranks and phases, by repeat."""
    found = [[_total(epoch, "joules") for epoch in run.steady] for run in group.runs]
    return found if all(sum(values) > 0 for values in found) else None


def peak(group: Group, resource: str) -> float | None:
    """The greatest of any rank, phase and epoch; the median over repeats."""
    peaks = [[max(v) for e in run.epochs for v in e.usage.get(resource, {}).values() if v] for run in group.runs]
    return median(max(values) for values in peaks) if all(peaks) else None


def _measured(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if all(any(epoch.usage for epoch in run.steady) for run in group.runs)]


def _busy(groups: Sequence[Group], resource: str) -> Figure | None:
    table = {
        g.label or "all runs": found for g in groups if (found := utilisation((e for r in g.runs for e in r.steady), resource))
    }
    if not table:
        return None
    phases = [name for name in (*PHASES, "epoch") if any(name in row for row in table.values())]
    shown = list(table.items())[-_MOST:]
    title, y = _BUSY[resource]
    by_name = [Bars(name=name, values=[row.get(p) for p in phases], series=i) for i, (name, row) in enumerate(shown)]
    view, height = bar_view(phases, by_name, axis=y, names="phase", form=",.3~r" if resource == "cpu_seconds" else ".1~%")
    name, row = shown[-1]
    form = {"tickformat": ".0%"} if resource != "cpu_seconds" else {}
    does = "a rank keeps cores busy:" if not form else "the GPU is busy:"
    what = listed(f"{share(row[p]) if form else number(row[p])} in {p}" for p in phases if p in row)
    rest = f" The last {_MOST} of {len(table)} settings are drawn." if len(table) > _MOST else ""
    sentence = f"With {name} {does} {what}.{rest}" if len(table) > 1 else f"{does[:1].upper()}{does[1:]} {what}."
    if phases == ["epoch"]:
        sentence += " That is of whole epochs and their validation: phases are not told apart."
    return Figure(
        title=title,
        sentence=sentence,
        alt=f"Bars by phase for {len(shown)} settings. {sentence}",
        columns=["runs", *phases],
        rows=[[name, *(row.get(phase) for phase in phases)] for name, row in table.items()],
        views=[view],
        height=height,
    )


def _energy(groups: Sequence[Group], targets: Sequence[Target]) -> Figure | None:
    found = [(group, median(map(median, energy))) for group in groups if (energy := joules(group)) is not None]
    if len(found) < 2:
        return None
    labels = [group.label or "all runs" for group, _ in found]
    drawn = [_energy_view("per epoch", labels, [value for _, value in found])]
    rows: list[list[object]] = [[name, value] for name, (_, value) in zip(labels, found, strict=True)]
    for target in targets:
        epochs = [[n for n in group.epochs_to(target) if n is not None] for group, _ in found]
        totals = [value * median(n) if len(n) == len(g.runs) else None for n, (g, value) in zip(epochs, found, strict=True)]
        drawn.append(_energy_view(f"to {target}", labels, totals))
        for row, total in zip(rows, totals, strict=True):
            row.append(total)
    least = min(range(len(found)), key=lambda at: found[at][1])
    most = max(range(len(found)), key=lambda at: found[at][1])
    sentence = (
        f"An epoch costs least energy with {labels[least]}, {number(found[least][1])} J, and most with {labels[most]}, "
        f"{number(found[most][1])} J."
    )
    return Figure(
        title="Energy",
        sentence=sentence,
        alt=f"Bars of joules for {len(found)} settings. {sentence}",
        columns=["runs", "joules per epoch", *(f"joules to {target}" for target in targets)],
        rows=rows,
        views=[view for view, _ in drawn],
        height=drawn[0][1],
    )


def _energy_view(label: str, names: Sequence[str], values: Sequence[float | None]) -> tuple[View, int]:
    return bar_view(names, [Bars(name="", values=values)], axis="joules", unit=" J", label=label)


def _bytes(group: Group, resource: str) -> float | None:
    if resource.endswith("memory_bytes"):
        return peak(group, resource)
    if not all(any(resource in epoch.usage for epoch in run.steady) for run in group.runs):
        return None
    return median(median(_total(epoch, resource) for epoch in run.steady) for run in group.runs)


def _total(epoch: EpochRecord, resource: str) -> float:
    return sum(sum(values) for values in epoch.usage.get(resource, {}).values())


def _amount(resource: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{number(value)}\u00a0J" if resource == "joules" else size(value)
