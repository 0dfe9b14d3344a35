"""Two runs, studies or folders of repeats against each other: what differs, with intervals, and never more than is shown.

    comparison = compare(Path("runs/before"), Path("runs/after"))
    comparison.findings[0].verdict        # "faster by 12 % (8 % to 17 %)"

Settings that both sides have (the same ranks, the same period) are compared each with its like; where each side has one setting,
they are compared whatever they are. Times are of steady epochs; scores of the last epoch that both sides reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from pathlib import Path
from statistics import median

from deepex.errors import RunError
from deepex.record import PHASES, EpochRecord
from deepex.record.measure import Measure
from deepex.report.collect import collect
from deepex.report.experiment import Group, experiments
from deepex.speedup.statistics import Groups, Interval, middle, ratio, verdict


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measure of one setting: both sides' values, the ratio of the first to the second, and what it shows."""

    setting: str
    measure: str
    first: Interval
    second: Interval
    gained: Interval
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All findings; `only` names settings that one side alone has, `once` whether some setting has no repeats."""

    findings: list[Finding]
    only: list[str]
    once: bool


def compare(first: Path, second: Path) -> Comparison:
    """Compare what is in two directories."""
    ours, theirs = _settings(first), _settings(second)
    if len(ours) == len(theirs) == 1:
        (name, one), (other_name, other) = *ours.items(), *theirs.items()
        pairs = [(name if name == other_name else f"{name or 'run'} | {other_name or 'run'}", one, other)]
        only = []
    else:
        pairs = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
        only = [
            f"{name} ({side})"
            for names, others, side in ((ours, theirs, first), (theirs, ours, second))
            for name in names
            if name not in others
        ]
    if not pairs:
        raise RunError(
            f"{first} has {', '.join(ours) or 'no setting'}, and {second} {', '.join(theirs) or 'none'}: nothing in common: give "
            "two studies of the same kind, or two runs"
        )
    findings = [finding for name, one, other in pairs for finding in _findings(name or "run", one, other)]
    return Comparison(findings=findings, only=only, once=any(min(len(a.runs), len(b.runs)) == 1 for _name, a, b in pairs))


def _settings(path: Path) -> dict[str, Group]:
    found = experiments(collect([path]))
    several = len(found) > 1
    return {f"{one.title}: {group.label}" if several else group.label: group for one in found for group in one.groups}


def _findings(name: str, one: Group, other: Group) -> list[Finding]:
    findings = [_time(name, "an epoch", one, other, attrgetter("seconds"))]
    if all(run.has_phases for run in (*one.runs, *other.runs)):
        findings += [_time(name, phase, one, other, methodcaller("phase_seconds", phase)) for phase in PHASES]
    last = min(run.epochs[-1].epoch for run in (*one.runs, *other.runs))
    for part in ("train", "validation"):
        scores = [_scores(group, part, one.runs[0].measure, last) for group in (one, other)]
        if all(scores):
            measure = one.runs[0].measure
            text, worse = f"{part} {measure.name} after {last} epoch(s)", "lower" if measure.better == "higher" else "higher"
            findings.append(_finding(name, text, scores[0], scores[1], better=measure.better, worse=worse))
    return findings


def _time(name: str, what: str, one: Group, other: Group, value: Callable[[EpochRecord], float]) -> Finding:
    times = [[[value(epoch) for epoch in run.steady] for run in group.runs] for group in (one, other)]
    return _finding(name, f"seconds of {what}", times[0], times[1], better="faster", worse="slower")


def _scores(group: Group, part: str, measure: Measure, last: int) -> list[list[float]]:
    found = [[epoch.score(part, measure.name) for epoch in run.epochs if epoch.epoch == last] for run in group.runs]
    return [[value for value in values if value is not None] for values in found] if all(map(_known, found)) else []


def _known(values: Sequence[float | None]) -> bool:
    return bool(values) and None not in values


def _finding(name: str, measure: str, one: Groups, other: Groups, *, better: str, worse: str) -> Finding:
    first, second = middle(one), middle(other)
    if not (first.value > 0 and all(median(group) > 0 for group in other)):  # a phase that takes no time, an error of zero
        same = Interval(value=1.0, low=0.0, high=float("inf"), repeats=min(len(one), len(other)))
        return Finding(setting=name, measure=measure, first=first, second=second, gained=same, verdict="no ratio: a value is zero")
    gained = ratio(one, other)
    return Finding(setting=name, measure=measure, first=first, second=second, gained=gained, verdict=verdict(gained, better, worse))
