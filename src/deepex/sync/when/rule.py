"""When replicas agree: rules for the period.

    rule = parse_period("4 per epoch")
    rule.begin_epoch(0, rate)
    segments(rule, 0, 94)       # [(0, 24), (24, 47), (47, 71), (71, 94)]

A rule plans one epoch at a time, from what it has seen of those before: the loss, drift and times reach the host once per epoch, on
every rank the same. One that has seen nothing yet may plan the first stretch alone, look at the drift, and plan the rest (`look`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

RateOfStep = Callable[[int], float]  # of a step of the epoch

NEVER: Final = 1e15  # steps: more than there are in an epoch


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an epoch has shown, on all ranks together.

    `drift`: how far a replica was from the mean at a sync, as a share of the mean's norm (root mean square); where there was a
    `look`, at those after it. `lost`: how often a replica was left out of a mean. `step_seconds` is of one step of the slowest rank
    (of all its replicas), `sync_seconds` of one sync, waiting for others left out.
    """

    epoch: int
    loss: float
    drift: float
    step_seconds: float
    sync_seconds: float
    steps: int
    syncs: int
    validation_loss: float | None = None
    lost: int = 0

    @property
    def period(self) -> float:
        """The mean period of the epoch."""
        return self.steps / self.syncs


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a rule must know of the strategy whose syncs it plans.

    `age`: how many periods old the mean is that a weight moves on from, as drift goes: 1 where each sync makes replicas equal.
    `pieces`: into so many stretches is a period cut. `hides`: syncs run while replicas compute.
    """

    age: int = 1
    pieces: int = 1
    hides: bool = False


class PeriodRule(ABC):
    """Says where the next sync is. `reason` is why, for the record; `state` is what a resumed run must know."""

    @property
    def reason(self) -> str:
        """Why the period of this epoch is what it is."""
        return "asked for"

    @property
    def state(self) -> dict[str, Any]:
        """What was learnt, as JSON has it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what another of its kind has learnt."""
        return

    def begin_epoch(self, epoch: int, rate: RateOfStep) -> None:
        """An epoch, counted from 0, is about to be planned; `rate` is the learning rate in each of its steps."""
        return

    @property
    def wants_times(self) -> bool:
        """Whether it would like to know how many steps a sync takes, from a trial before the first epoch."""
        return False

    def measured(self, cost: float) -> None:
        """Hear how many steps a sync took before the first epoch."""
        return

    @property
    def wants_look(self) -> bool:
        """Whether the rest of the epoch is better planned after its first sync, with the drift seen there."""
        return False

    def look(self, drift: float, step: int) -> None:
        """Hear of the drift at the first sync of an epoch, after `step` steps."""
        return

    @abstractmethod
    def next_sync(self, step: int, steps: int) -> int:
        """Give the step, after `step` and up to `steps`, at which the next sync happens; `steps` is the end of the epoch."""

    def learn(self, seen: Seen) -> None:
        """Hear what an epoch has shown."""
        return

    def longest(self, steps: int) -> int:
        """The longest period that there can be in an epoch of `steps`."""
        return steps


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads a period as a person writes it, with the `options` of a configuration, by the first of `parsers` that knows it."""

    options: Any
    situation: Situation
    parsers: tuple[Callable[[str, "Reader"], PeriodRule | None], ...]

    def read(self, text: str) -> PeriodRule | None:
        """The rule that is meant; None if nobody knows it."""
        return next((rule for parse in self.parsers if (rule := parse(text, self)) is not None), None)


def stretches(rule: PeriodRule, start: int, steps: int) -> list[tuple[int, int]]:
    """The stretches between syncs, from step `start` to the end of the epoch."""
    result = []
    while start < steps:
        stop = rule.next_sync(start, steps)
        result.append((start, stop))
        start = stop
    return result
