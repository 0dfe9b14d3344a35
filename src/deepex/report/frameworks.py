"""DeepEx beside other frameworks: rate, time to the target, memory, and how much slower each is than the best.

framework_figures(experiment), framework_table(experiment)
"""

from statistics import median

from deepex.report.bars import Bars, bar_view
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, Table
from deepex.report.settings import fastest
from deepex.report.storage import rates
from deepex.report.usage import peak
from deepex.report.words import fast, number, seconds, size, within
from deepex.speedup.statistics import middle, ratio


def framework_table(experiment: Experiment) -> Table:
    """One row for each framework, the fastest first."""
    groups = sorted(experiment.groups, key=lambda group: -_rate(group))
    best = groups[0]
    target = experiment.targets[0] if experiment.targets else None
    rows = []
    for group in groups:
        rate = middle(rates(group))
        times = group.seconds_to(target) if target else None
        memory = {name: value for name in ("memory_bytes", "gpu_memory_bytes") if (value := peak(group, name)) is not None}
        rows.append(
            [
                group.label,
                f"{number(rate.value)} {within(rate)}",
                "best" if group is best else fast(ratio(best.seconds, group.seconds)),
                "not reached every time" if target and times is None else "" if times is None else seconds(middle(times).value),
                ", ".join(f"{size(value)}{' GPU' if name.startswith('gpu') else ''}" for name, value in memory.items())
                or "not measured",
            ]
        )
    return Table(
        title="Frameworks",
        columns=["framework", "samples per second", "against the best", f"time to {target or 'a target'}", "peak memory per rank"],
        rows=rows,
        sentence="Intervals are of 95 %; the ratio is of seconds per steady epoch.",
        marked=frozenset({0}),
    )


def framework_figures(experiment: Experiment) -> list[Figure]:
    """Rates with intervals."""
    groups = sorted(experiment.groups, key=lambda group: -_rate(group))
    if len(groups) < 2:
        return []
    found = [middle(rates(group)) for group in groups]
    row = Bars(name="", values=[one.value for one in found], intervals=found)
    view, height = bar_view([group.label for group in groups], [row], axis="samples per second", unit=" per second")
    sentence = fastest(groups)
    return [
        Figure(
            title="Samples per second by framework",
            sentence=sentence,
            alt=f"Bars of samples per second for {len(groups)} frameworks. {sentence}",
            columns=["framework", "samples per second", "low", "high", "repeats"],
            rows=[[g.label, one.value, one.low, one.high, one.repeats] for g, one in zip(groups, found, strict=True)],
            views=[view],
            height=height,
        )
    ]


def _rate(group: Group) -> float:
    return median(map(median, rates(group)))
