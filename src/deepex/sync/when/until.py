"""One rule for the first epochs, then another: `1 until 5 then 16` is post-local SGD (Lin et al. 2020).

For users: docs/synchronisation.md#until-then
"""

import re
from typing import Any, Final, final

from typing_extensions import override

from deepex.sync.when.rule import PeriodRule, RateOfStep, Reader, Seen

WRITTEN: Final = "a change such as '1 until 5 then 16' (after 5 epochs)"


@final
class Until(PeriodRule):
    """One rule for the first `epochs` epochs, then another: post-local SGD (Lin et al. 2020), if the first is 1."""

    def __init__(self, first: PeriodRule, epochs: int, then: PeriodRule) -> None:
        self._first, self._epochs, self._then, self._now = first, epochs, then, first

    @property
    @override
    def reason(self) -> str:
        when = f"until {self._epochs} epochs are done" if self._now is self._first else f"after {self._epochs} epochs"
        return f"{self._now.reason} {when}"

    @property
    @override
    def state(self) -> dict[str, Any]:
        return {"first": self._first.state, "then": self._then.state}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._first.restore(state.get("first", {}))
        self._then.restore(state.get("then", {}))

    @override
    def begin_epoch(self, epoch: int, rate: RateOfStep) -> None:
        self._now = self._first if epoch < self._epochs else self._then
        self._now.begin_epoch(epoch, rate)

    @property
    @override
    def wants_look(self) -> bool:
        return self._now.wants_look

    @override
    def look(self, drift: float, step: int) -> None:
        self._now.look(drift, step)

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return self._now.next_sync(step, steps)

    @override
    def learn(self, seen: Seen) -> None:
        self._first.learn(seen)
        self._then.learn(seen)


def parse(text: str, reader: Reader) -> PeriodRule | None:
    """Read `RULE until N then RULE`."""
    match = re.fullmatch(r"(.+?)\s+until\s+(\d{1,18})(?:\s+epochs?)?,?\s+then\s+(.+)", text)
    if match is None:
        return None
    first, then = reader.read(match[1]), reader.read(match[3])
    return Until(first, int(match[2]), then) if first and then else None
