"""A period that is chosen from what is measured: how many steps a sync takes, and how far replicas drift apart.

    rule = AutoPeriod(tolerance=0.14, longest=256)
    rule.learn(seen); rule.reason       # "auto: 8, because a sync takes 3.1 steps and drift in 4 steps is 0.03 of the weights"

The period is the one with which learning is expected to take the least time, which is the product of two factors:

    time(H) ∝ (1 + cost / H) · (1 + (drift(H) / tolerance)²)

- The first is the time of an epoch: a sync takes as long as `cost` steps, and each step bears 1/H of it. Of a sync in the
  background only what is longer than a period counts, and some of the rest; how long it takes does not show there, so what was
  tried before the first epoch holds, unless replicas have to wait for it.
- The second is the number of epochs: replicas that are `tolerance` of the weights' norm apart when they meet need twice as many.
  The square is what the second order of a loss makes of a distance; that it holds, and the usual tolerance, were found by sweeps
  over fixed periods (benchmarks/periods.py), on workloads that are not those on which the rule was judged.
- Drift grows with H^¾: with the root where noise leads, in proportion while momentum builds up.
With the same expectation `sync=auto` chooses between syncs that wait and such as are hidden (`expected`).

Without bounds from theory there is a guard: if drift, or the gap between validation and training loss, grows by much, or a replica
was lost (its loss was no number, or absurd), the period is halved, whatever the times say, and may grow again from epoch to epoch.
The periods of an epoch are of equal length, or nearly; those of the first are planned when the drift of its first stretch is known.

For users: docs/synchronisation.md#period-auto
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from deepex.record.options import KeyRules, Options
from deepex.sync.when.fixed import PerEpoch
from deepex.sync.when.rule import PeriodRule, RateOfStep, Reader, Seen, Situation

WRITTEN: Final = "auto"

_EXPONENT: Final = 0.75  # of drift over the period
_FIRST_DRIFT: Final = 0.0125  # in one step, of the weights' norm, until it has been measured
_MORE_DRIFT: Final = 0.025  # which some networks have
_LEFT: Final = 0.15  # of a sync that a period could hide: it was 0.13 to 0.2 (benchmarks/slow_network.py)
_GROWTH: Final = 4  # of the period, from one epoch to the next at most
_DRIFT_ALARM: Final = 1.5  # times the last epoch's
_MUCH: Final = 0.25  # of the tolerance: drift below it may grow as it likes
_GAP_ALARM: Final = 0.25  # of the training loss
_MUCH_WAITED: Final = 0.5  # of a period, or of a sync
_MANY: Final = 16  # syncs, beside which the one at the end of an epoch, which is of all parts, does not count for much
_NO_TIME: Final = 1e-9  # seconds


@dataclass(frozen=True, kw_only=True)
class AutoOptions(Options):
    """`tolerance`: the drift, as a share of the weights' norm, with which learning takes twice as many epochs.

    `longest`: the longest period. `cost`: how many steps a sync takes, in the background one of a part. With 0 it is measured, but
    not in a deterministic run, which must not follow a clock.
    """

    tolerance: float = 0.14
    longest: int = 256
    cost: float = 0.0

    rules: ClassVar[KeyRules] = {
        "tolerance": (lambda value: value > 0, "above 0, a share of the weights' norm"),
        "longest": (lambda value: value >= 1, "at least 1"),
        "cost": (lambda value: value >= 0, "at least 0, in steps (0: it is measured)"),
    }


@final
class AutoPeriod(PeriodRule):
    """Begins from a `cost` that is given or tried before the first epoch, and learns from each epoch.

    Drift that was seen at syncs of the strategy's kind has their `age` in itself.
    """

    def __init__(self, *, tolerance: float, longest: int, cost: float = 0.0, situation: Situation | None = None) -> None:
        self._tolerance, self._longest, self._cost = tolerance, longest, cost
        situation = situation or Situation()
        self._age, self._pieces, self._hides = situation.age, situation.pieces, situation.hides
        self._period, self._reason = 1, "auto: 1, because nothing has been measured yet"
        self._bound = longest
        self._before: dict[str, float] = {}
        self._first_cost, self._looked, self._planned_from = 0.0, False, 0
        if cost:
            self._begin(cost, "sync.cost says that a sync takes")

    @property
    @override
    def reason(self) -> str:
        return self._reason

    @property
    @override
    def state(self) -> dict[str, Any]:
        learnt = {"period": self._period, "reason": self._reason, "bound": self._bound, "before": self._before}
        return {**learnt, "planned_from": self._planned_from, "looked": self._looked, "first_cost": self._first_cost}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._period, self._reason = int(state.get("period", 1)), str(state.get("reason", self._reason))
        self._bound, self._before = int(state.get("bound", self._longest)), dict(state.get("before", {}))
        self._looked, self._planned_from = bool(state.get("looked", True)), int(state.get("planned_from", 0))
        self._first_cost = float(state.get("first_cost", self._first_cost))

    @override
    def begin_epoch(self, epoch: int, rate: RateOfStep) -> None:
        return

    @override
    def next_sync(self, step: int, steps: int) -> int:
        done = self._planned_from
        rest = steps - done
        syncs = max(round(rest / self._period), -(-rest // self._longest))
        return done + PerEpoch(self._pieces * syncs).next_sync(step - done, rest)

    @property
    @override
    def wants_times(self) -> bool:
        return not self._cost

    @override
    def measured(self, cost: float) -> None:
        self._begin(min(cost, float(self._longest) ** 2), "before the first epoch a sync took")

    @property
    @override
    def wants_look(self) -> bool:
        return not self._looked

    @override
    def look(self, drift: float, step: int) -> None:
        if drift > 0:  # else replicas have not met yet, as in the background
            self._looked = True
            most = step * _GROWTH if self._age == 1 else self._period  # what an old mean does to learning shows late
            self._period = min(self._best(self._first_cost, drift * (self._age / step) ** _EXPONENT), most)
            self._planned_from = step
            self._reason += f"; after {step} steps {self._period}, because drift in them was {drift:.2g} of the weights"

    @override
    def learn(self, seen: Seen) -> None:
        period = (seen.steps - self._planned_from) / (seen.syncs - 1) if self._planned_from else seen.period
        self._looked, self._planned_from = True, 0
        took = self._ratio(seen.step_seconds, seen.sync_seconds)
        cost = self._cost or (self._hidden(took, period, seen.syncs) if self._hides else took)
        drift = seen.drift / period**_EXPONENT
        alarm, had = self._alarm(seen, drift), min(self._period, seen.steps)
        self._bound = max(1, min(self._bound, had) // 2) if alarm else min(self._bound * _GROWTH, self._longest)
        wanted = self._best(cost, drift)
        self._period = min(wanted, self._bound, had * _GROWTH)
        times = f"a sync takes {cost:.2g} steps" if self._cost or seen.step_seconds > _NO_TIME else "times are not looked at"
        held = f", which would be {wanted}" if wanted != self._period else ""
        drifted = f"drift in {period:.3g} steps is {seen.drift:.2g} of the weights"
        self._reason = f"auto: {self._period}, because {times} and {drifted}{held}{alarm}"

    def expected(self, cost: float, steps: int, *, last: float = 0.0) -> float:
        """How long learning would take with the best period, in epochs of `steps`, where replicas drift apart faster than usual.

        In times that it takes if syncs cost nothing. `last` is what the sync at the end of an epoch takes beside the others.
        """
        drift = _MORE_DRIFT * self._age**_EXPONENT
        return min(self._time(period, cost, drift, last / steps) for period in range(1, min(self._longest, steps) + 1))

    def _begin(self, cost: float, words: str) -> None:
        self._first_cost = cost
        self._period = self._best(cost, _FIRST_DRIFT * self._age**_EXPONENT)
        self._reason = f"auto: {self._period}, because {words} {cost:.2g} steps"

    def _best(self, cost: float, drift: float) -> int:
        """The period of the least time, with what replicas drift in one step."""
        return min(range(1, self._longest + 1), key=lambda period: self._time(period, cost, drift))

    def _time(self, period: int, cost: float, drift: float, last: float = 0.0) -> float:
        waits = max(0.0, cost - period) + _LEFT * min(cost, period) if self._hides else cost
        return (1 + waits / period + last) * (1 + (drift * math.pow(period, _EXPONENT) / self._tolerance) ** 2)

    def _hidden(self, waited: float, period: float, syncs: int) -> float:
        """How many steps a sync in the background takes: as it was, or a period and the steps that were waited for it."""
        if waited > _MUCH_WAITED * max(period, self._first_cost) and syncs >= _MANY:
            self._first_cost = min(period + waited, float(self._longest) ** 2)
        return self._first_cost

    def _ratio(self, step_seconds: float, sync_seconds: float) -> float:
        """How many steps a sync takes; beyond `longest`² more makes no difference, and no steps have no time."""
        return min(sync_seconds / step_seconds, float(self._longest) ** 2) if step_seconds > _NO_TIME else 0.0

    def _alarm(self, seen: Seen, drift: float) -> str:
        """What has gone wrong since the last epoch, in words; empty if nothing has. `drift` is that in one step."""
        gap = max(seen.validation_loss - seen.loss, 0.0) if seen.validation_loss is not None else 0.0
        now = {"drift": drift, "gap": gap}
        before = self._before or now
        grown = [
            name
            for name, has in (
                ("drift", seen.drift > _MUCH * self._tolerance and now["drift"] > _DRIFT_ALARM * before["drift"]),
                ("the gap to validation", gap - before["gap"] > _GAP_ALARM * abs(seen.loss)),
            )
            if has
        ]
        self._before = now
        wrong = [f"{' and '.join(grown)} grew"] if grown else []
        wrong += ["a replica was lost"] if seen.lost else []
        return f"; {' and '.join(wrong)}, so the period is halved" if wrong else ""


def parse(text: str, reader: Reader) -> PeriodRule | None:
    """Read `auto`."""
    options = reader.options
    if text != WRITTEN:
        return None
    return AutoPeriod(tolerance=options.tolerance, longest=options.longest, cost=options.cost, situation=reader.situation)
