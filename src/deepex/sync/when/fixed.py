"""A period that stands from the beginning: `16`, `epoch`, `4 per epoch` (or `4/epoch`).

For users: docs/synchronisation.md#steps
"""

import re
from dataclasses import dataclass
from typing import Final, final

from typing_extensions import override

from deepex.sync.when.rule import PeriodRule, Reader

WRITTEN: Final = "a number of steps of at least 1, 'epoch', a number such as '4 per epoch'"


@final
@dataclass(frozen=True)
class EverySteps(PeriodRule):
    """A sync every `period` steps, and at the end of the epoch."""

    period: int

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return min(step - step % self.period + self.period, steps)

    @override
    def longest(self, steps: int) -> int:
        return min(self.period, steps)


@final
@dataclass(frozen=True)
class PerEpoch(PeriodRule):
    """`times` near-equal periods in each epoch; in an epoch of fewer steps, a sync at each."""

    times: int

    @override
    def next_sync(self, step: int, steps: int) -> int:
        done = step * self.times // steps  # periods that have ended by then
        return -(-(done + 1) * steps // self.times)

    @override
    def longest(self, steps: int) -> int:
        return -(-steps // self.times)


def parse(text: str, _: Reader) -> PeriodRule | None:
    """Read `16`, `epoch` or `4 per epoch`."""
    if text == "epoch":
        return PerEpoch(1)
    if not (match := re.fullmatch(r"(\d{1,18})(\s*(?:per|/)\s*epoch)?", text)) or not int(match[1]):
        return None
    return PerEpoch(int(match[1])) if match[2] else EverySteps(int(match[1]))
