"""`qsr`, the quadratic synchronisation rule: ever longer periods, as the learning rate decays.

For users: docs/synchronisation.md#qsr
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Final, final

from typing_extensions import override

from deepex.record.options import KeyRules, Options
from deepex.sync.when.rule import NEVER, PeriodRule, RateOfStep, Reader

WRITTEN: Final = "qsr"


@dataclass(frozen=True, kw_only=True)
class QuadraticOptions(Options):
    """`base`: the shortest period; `alpha`: that of the rule."""

    base: int = 16
    alpha: float = 0.02

    rules: ClassVar[KeyRules] = {"base": (lambda value: value >= 1, "at least 1"), "alpha": (lambda value: value > 0, "above 0")}


@final
class Quadratic(PeriodRule):
    """H = max(H_base, ⌊(α / η)²⌋), with η the learning rate (QSR: Gu et al. 2024): ever longer as the rate decays."""

    def __init__(self, base: int, alpha: float) -> None:
        self._base, self._alpha = base, alpha
        self._rate: RateOfStep = lambda _step: math.inf

    def _period(self, step: int) -> int:
        rate = self._rate(step)
        return max(self._base, math.floor(min(self._alpha / rate, NEVER) ** 2) if rate > 0 else self._base)

    @property
    @override
    def reason(self) -> str:
        return f"qsr: max({self._base}, ⌊({self._alpha:g} / {self._rate(0):.4g})²⌋) = {self._period(0)} at the first step"

    @override
    def begin_epoch(self, epoch: int, rate: RateOfStep) -> None:
        self._rate = rate

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return min(step + self._period(step), steps)


def parse(text: str, reader: Reader) -> PeriodRule | None:
    """Read `qsr`."""
    return Quadratic(reader.options.base, reader.options.alpha) if text == WRITTEN else None
