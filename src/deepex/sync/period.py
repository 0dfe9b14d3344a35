"""When replicas agree: rules for the period.

    rule = parse_period("4 per epoch")
    rule.next_sync(0, 94)       # 24: the step after which the next sync comes

A rule is asked anew at each sync, so one that adapts to what it has seen fits the same contract.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from typing_extensions import override

from deepex.errors import ConfigError


class PeriodRule(ABC):
    """Says where the next sync is."""

    @abstractmethod
    def next_sync(self, step: int, steps: int) -> int:
        """Give the step, after `step` and up to `steps`, at which the next sync happens; `steps` is the end of the epoch."""


@final
@dataclass(frozen=True)
class EverySteps(PeriodRule):
    """A sync every `period` steps, and at the end of the epoch."""

    period: int

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return min(step - step % self.period + self.period, steps)


@final
@dataclass(frozen=True)
class PerEpoch(PeriodRule):
    """`times` near-equal periods in each epoch; in an epoch of fewer steps, a sync at each."""

    times: int

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return next(end for k in range(1, self.times + 1) if (end := -(-k * steps // self.times)) > step)


def parse_period(period: int | str) -> PeriodRule:
    """Read a period as a person writes it: 16, "epoch", "4 per epoch" (or "4/epoch")."""
    if isinstance(period, int) and period >= 1:
        return EverySteps(period)
    if period == "epoch":
        return PerEpoch(1)
    match = re.fullmatch(r"(\d+)\s*(?:per|/)\s*epoch", period.strip()) if isinstance(period, str) else None
    if match and int(match[1]) >= 1:
        return PerEpoch(int(match[1]))
    raise ConfigError(
        f"sync.period is {period!r}; it must be a number of steps of at least 1, 'epoch', or a number such as '4 per epoch'"
    )


def segments(rule: PeriodRule, start: int, steps: int) -> list[tuple[int, int]]:
    """The stretches between syncs, from step `start` to the end of the epoch."""
    result = []
    while start < steps:
        stop = rule.next_sync(start, steps)
        result.append((start, stop))
        start = stop
    return result
