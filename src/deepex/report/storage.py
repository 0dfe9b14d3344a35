"""Where samples come from: rates of the first epoch, which reads the files, and of later ones, and the time lost to input.

storage_figures(experiment)
"""

from collections.abc import Sequence
from statistics import median

from deepex.record import EpochRecord
from deepex.report.bars import Bars, bar_view
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, Table
from deepex.report.words import number, share, size
from deepex.speedup.statistics import middle


def storage_figures(experiment: Experiment) -> list[Figure]:
    """Rates and input's share for each placement × format × directory."""
    groups = experiment.groups
    return [_rates(groups), _lost(groups)] if len(groups) > 1 else []


def storage_table(experiment: Experiment) -> Table | None:
    """Files opened and bytes read by all ranks for training: in the first epoch, and in a later one."""
    if not any("opens" in run.epochs[0].usage for run in experiment.runs):
        return None
    rows = [[group.label, *_read(group, later=False), *_read(group, later=True), _cached(group)] for group in experiment.groups]
    return Table(
        title="Files opened and bytes read",
        sentence="By all ranks, for training alone; medians over repeats. What is kept in memory is read in the first epoch only. "
        "Files that were not in the system's cache before a run come from the disk then.",
        columns=["setting", "opens, first epoch", "bytes, first epoch", "opens, later", "bytes, later", "in the cache before"],
        rows=rows,
    )


def _read(group: Group, *, later: bool) -> tuple[str, str]:
    epochs = [run.steady[-1] if later else run.epochs[0] for run in group.runs]
    opens, many = (median(sum(epoch.usage.get(key, {}).get("input", [0.0])) for epoch in epochs) for key in ("opens", "data_bytes"))
    return f"{opens:,.0f}", size(many)


def _cached(group: Group) -> str:
    """Whether the files were in the system's page cache when the runs began."""
    cold = [run.page_cache.get("cold") for run in group.runs]
    if None in cold:
        return "not known"
    return "no" if all(cold) else "in some runs" if any(cold) else "yes"


def rates(group: Group) -> list[list[float]]:
    """Samples per second of steady epochs, by repeat."""
    return [[epoch.samples / epoch.seconds for epoch in run.steady] for run in group.runs]


def _first(group: Group) -> float:
    return median(run.epochs[0].samples / run.epochs[0].seconds for run in group.runs)


def _rates(groups: list[Group]) -> Figure:
    labels = [group.label for group in groups]
    later, first = [middle(rates(group)) for group in groups], [_first(group) for group in groups]
    rows = [
        Bars(name="first epoch", values=first),
        Bars(name="steady epochs", values=[o.value for o in later], intervals=later, series=1),
    ]
    view, height = bar_view(labels, rows, axis="samples per second", unit=" per second")
    best = max(range(len(groups)), key=lambda at: later[at].value)
    cold = max(range(len(groups)), key=first.__getitem__)
    sentence = (
        f"{labels[best]} is fastest in steady epochs, {number(later[best].value)} samples per second; in the first epoch "
        f"{'too' if cold == best else labels[cold] + ' is'}, {number(first[cold])}."
    )
    return Figure(
        title="Samples per second by placement, format and directory",
        sentence=sentence,
        alt=f"Bars for {len(groups)} settings: the first epoch and steady epochs. {sentence}",
        columns=["setting", "first epoch (samples/s)", "steady (samples/s)", "low", "high", "repeats"],
        rows=[[n, f, s.value, s.low, s.high, s.repeats] for n, f, s in zip(labels, first, later, strict=True)],
        views=[view],
        height=height,
    )


def _lost(groups: list[Group]) -> Figure:
    labels = [group.label for group in groups]
    first = [median(_share(run.epochs[:1]) for run in group.runs) for group in groups]
    later = [median(_share(run.steady) for run in group.runs) for group in groups]
    rows = [Bars(name="first epoch", values=first), Bars(name="steady epochs", values=later, series=1)]
    view, height = bar_view(labels, rows, axis="share of the time", form=".1~%")
    worst, least = (choose(range(len(groups)), key=later.__getitem__) for choose in (max, min))
    sentence = (
        f"Steady epochs lose most to input with {labels[worst]}, {share(later[worst])} of their time (its first epoch "
        f"{share(first[worst])}), and least with {labels[least]}, {share(later[least])}."
    )
    return Figure(
        title="Share of the time lost to input",
        sentence=sentence,
        alt=f"Bars of the share of input in the first epoch and in steady ones. {sentence}",
        columns=["setting", "first epoch", "steady epochs"],
        rows=[[n, f, s] for n, f, s in zip(labels, first, later, strict=True)],
        views=[view],
        height=height,
    )


def _share(epochs: Sequence[EpochRecord]) -> float:
    return median(epoch.phase_seconds("input") / (sum(epoch.wall) / epoch.ranks) for epoch in epochs)
