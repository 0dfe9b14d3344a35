"""What more ranks gained, with intervals: computed once, and used by figures and by the summary.

for gain in gains(experiment):
    gain.group.ranks, gain.per_epoch, gain.learning
"""

from dataclasses import dataclass

from deepex.record import Target
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import MOST_LINES
from deepex.report.words import count, number, share, within
from deepex.speedup.statistics import Interval, ratio


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A group against the group of its ladder with the fewest ranks."""

    ladder: str
    base: Group
    group: Group
    per_epoch: Interval
    learning: dict[Target, Interval | None]

    @property
    def efficiency(self) -> Interval:
        """The share of the ideal speedup that was reached."""
        ideal = self.group.ranks / self.base.ranks
        one = self.per_epoch
        return Interval(value=one.value / ideal, low=one.low / ideal, high=one.high / ideal, repeats=one.repeats)

    @property
    def measured(self) -> bool:
        """Whether no time was predicted."""
        return self.base.measured and self.group.measured


def gains(experiment: Experiment) -> list[Gain]:
    """One for each group of each ladder but its first; the ladders with the most rungs, as many as a figure can show."""
    found = []
    for name, rungs in sorted(experiment.ladders().items(), key=lambda item: -len(item[1]))[:MOST_LINES]:
        base, *rest = rungs
        for group in rest:
            learning = {target: _learning(base, group, target) for target in experiment.targets}
            gained = ratio(base.seconds, group.seconds)
            found.append(Gain(ladder=name, base=base, group=group, per_epoch=gained, learning=learning))
    return found


def _learning(base: Group, group: Group, target: Target) -> Interval | None:
    before, after = base.seconds_to(target), group.seconds_to(target)
    return None if before is None or after is None else ratio(before, after)


def gain_text(gain: Gain) -> str:
    """`4 ranks: 2.9 times as fast per epoch as 1 (2.7 to 3.1; 3 repeats), efficiency 72 %; learning speedup …`."""
    per_epoch = gain.per_epoch
    head = f"{gain.ladder}, " if gain.ladder else ""
    head += f"{count(gain.group.ranks, 'rank')}{gain.group.sharing if gain.measured else ' (predicted)'}: "
    if per_epoch.low <= 1 <= per_epoch.high and per_epoch.low < per_epoch.high:
        text = f"no difference shown to {gain.base.ranks} per epoch (ratio {number(per_epoch.low)} to {number(per_epoch.high)})"
    else:
        text = f"{number(per_epoch.value)} times as fast per epoch as {gain.base.ranks} {within(per_epoch)}"
    return "; ".join([f"{head}{text}, efficiency {share(gain.efficiency.value)}", *_learning_texts(gain)]) + "."


def _learning_texts(gain: Gain) -> list[str]:
    texts = []
    for target, gained in gain.learning.items():
        if gained is None:
            texts.append(f"no learning speedup to {target}: {_unreached(gain, target)}")
        elif gained.low <= 1 <= gained.high and gained.low < gained.high:
            texts.append(f"no difference shown in time to {target} (ratio {number(gained.low)} to {number(gained.high)})")
        else:
            texts.append(f"learning speedup {number(gained.value)} to {target} {within(gained, repeats=False)}")
    return texts


def _unreached(gain: Gain, target: Target) -> str:
    parts = []
    for group in (gain.base, gain.group):
        missing = sum(epochs is None for epochs in group.epochs_to(target))
        if missing:
            parts.append(f"{missing} of {count(len(group.runs), 'run')} on {count(group.ranks, 'rank')} did not reach it")
    return " and ".join(parts)
