"""A period that is chosen from what is measured: how long a sync and a step take, and how far replicas drift apart.

    rule = Auto(share=0.1, longest=256)
    rule.learn(seen); rule.reason       # "auto: 8; a sync takes 3.1 steps, …"

H = clip(max(H_sys, H_alg), 1, H_max):
- H_sys = ⌈S·(1−e) / (e·Y)⌉ is the shortest period that keeps communication below a share e of the time, from the measured seconds
  of a sync, S, and of a step, Y.
- H_alg is the longest at which replicas stay close enough to be averaged: drift grows with the root of the period while noise
  leads, so H_alg = H · (tolerance / drift)². Longer than H_sys gains time; it costs learning only where drift is large.
A guard halves the bound on H_alg when drift, or the gap between validation and training loss, has grown, and lets it grow again.
"""

import math
from typing import Any, Final, final

from typing_extensions import override

from deepex.sync.period import PeriodRule, Rate, Seen

_TOLERANCE: Final = 0.01  # of the mean's norm
_GROWTH: Final = 2.0  # from one epoch to the next at most
_NO_TIME: Final = 1e-9  # seconds
_ALARM: Final = 1.5  # drift or gap that is so many times the last one's shortens the period


@final
class Auto(PeriodRule):
    """Begins with `first` steps, measured before the run where that is possible, and learns from each epoch."""

    def __init__(self, *, share: float, longest: int) -> None:
        self._share, self._longest = share, longest
        self._period, self._reason = 1, "auto: nothing has been measured yet"
        self._bound = float(longest)
        self._before: dict[str, float] = {}

    @property
    @override
    def reason(self) -> str:
        return self._reason

    @property
    @override
    def state(self) -> dict[str, Any]:
        return {"period": self._period, "reason": self._reason, "bound": self._bound, "before": self._before}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._period, self._reason = int(state.get("period", 1)), str(state.get("reason", self._reason))
        self._bound, self._before = float(state.get("bound", self._longest)), dict(state.get("before", {}))

    @override
    def begin_epoch(self, epoch: int, rate: Rate) -> None:
        return

    @override
    def next_sync(self, step: int, steps: int) -> int:
        return min(step + self._period, steps)

    def measured(self, *, step_seconds: float, sync_seconds: float) -> None:
        """Hear of times measured before the first epoch."""
        system = self._system(step_seconds, sync_seconds)
        self._period = min(system, self._longest)
        self._reason = f"auto: {self._period}; {self._steps(step_seconds, sync_seconds)}, tried before the first epoch"

    @override
    def learn(self, seen: Seen) -> None:
        system = self._system(seen.step_seconds, seen.sync_seconds)
        learnt = seen.period * (_TOLERANCE / max(seen.drift, 1e-9)) ** 2
        alarm = self._alarm(seen)
        self._bound = max(1.0, min(self._bound, seen.period) / 2) if alarm else min(self._bound * _GROWTH, self._longest)
        algorithm = max(1.0, min(learnt, self._bound, self._period * _GROWTH))
        self._period = max(1, min(max(system, math.floor(algorithm)), self._longest))
        self._reason = (
            f"auto: {self._period}; {self._steps(seen.step_seconds, seen.sync_seconds)}, so at least {system}; "
            f"drift is {seen.drift:.2g} of the weights, so up to {algorithm:.3g}{alarm}"
        )

    def _system(self, step_seconds: float, sync_seconds: float) -> int:
        if step_seconds <= _NO_TIME:
            return 1
        if sync_seconds > self._longest * step_seconds:
            return self._longest
        return max(1, math.ceil(sync_seconds * (1 - self._share) / (self._share * step_seconds)))

    @staticmethod
    def _steps(step_seconds: float, sync_seconds: float) -> str:
        return f"a sync takes {sync_seconds / step_seconds:.2g} steps" if step_seconds > _NO_TIME else "times are not looked at"

    def _alarm(self, seen: Seen) -> str:
        """What has grown since the last epoch, in words; empty if nothing has."""
        gap = seen.validation_loss - seen.loss if seen.validation_loss is not None else None
        now = {"drift": seen.drift / math.sqrt(seen.period)} | ({"gap": gap} if gap is not None else {})
        grown = [name for name, value in now.items() if name in self._before and value > _ALARM * abs(self._before[name]) > 0]
        self._before = now
        return f"; {' and '.join(grown)} grew, so the period is shortened" if grown else ""
