"""`adacomm`: ever shorter periods, as the training loss falls.

For users: docs/synchronisation.md#adacomm
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from deepex.record.options import KeyRules, Options
from deepex.sync.when.rule import NEVER, PeriodRule, Reader, Seen

WRITTEN: Final = "adacomm"


@dataclass(frozen=True, kw_only=True)
class AdaCommOptions(Options):
    """`base`: the period with which it begins."""

    base: int = 16

    rules: ClassVar[KeyRules] = {"base": (lambda value: value >= 1, "at least 1")}


@final
class AdaComm(PeriodRule):
    """H = ⌈√(F / F₀) · H₀⌉, with F the training loss of the last epoch and F₀ of the first (Wang & Joshi 2019): ever shorter."""

    def __init__(self, base: int) -> None:
        self._base, self._losses = base, list[float]()

    @property
    def _period(self) -> int:
        first, now = self._losses or (1.0, 1.0)
        return max(1, math.ceil(min(math.sqrt(max(now, 0.0) / first) * self._base, NEVER))) if first > 0 else self._base

    @property
    @override
    def reason(self) -> str:
        if not self._losses:
            return f"adacomm: the first epoch, {self._base}"
        return f"adacomm: ⌈√({self._losses[1]:.4g} / {self._losses[0]:.4g}) · {self._base}⌉ = {self._period}"

    @property
    @override
    def state(self) -> dict[str, Any]:
        return {"losses": self._losses}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._losses = [float(loss) for loss in state.get("losses", [])]

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return min(step + self._period, steps)

    @override
    def learn(self, seen: Seen) -> None:
        self._losses = [self._losses[0] if self._losses else seen.loss, seen.loss]


def parse(text: str, reader: Reader) -> PeriodRule | None:
    """Read `adacomm`."""
    return AdaComm(reader.options.base) if text == WRITTEN else None
