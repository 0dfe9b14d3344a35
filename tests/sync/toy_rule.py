"""A period rule in one file, as CONTRIBUTING has it for an exercise: periods that grow within each epoch.

`growing`: after `start` steps, then after `growth` times as many, and so on.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from typing_extensions import override

from deepex.record.options import KeyRules, Options
from deepex.sync.when.rule import PeriodRule, Reader

WRITTEN: Final = "growing"


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(Options):
    """`first`: the first period; `growth`: by so much each is longer than the one before."""

    first: int = 1
    growth: int = 2

    rules: ClassVar[KeyRules] = {
        "first": (lambda value: value >= 1, "at least 1"),
        "growth": (lambda value: value >= 2, "at least 2"),
    }


@final
class Growing(PeriodRule):
    """Syncs after `first`, `first` + `first` · `growth`, … steps."""

    def __init__(self, first: int, growth: int) -> None:
        self._first, self._growth = first, growth

    @property
    @override
    def reason(self) -> str:
        return f"growing: {self._first}, then {self._growth} times as long each"

    @override
    def next_sync(self, step: int, steps: int) -> int:
        end = period = self._first
        while end <= step:
            period *= self._growth
            end += period
        return min(end, steps)


def parse(text: str, reader: Reader) -> PeriodRule | None:
    """Read `growing`."""
    return Growing(reader.options.first, reader.options.growth) if text == WRITTEN else None
