"""When replicas agree: rules for the period.

    rule = parse_period("4 per epoch")
    rule.begin_epoch(0, rate)
    segments(rule, 0, 94)       # [(0, 24), (24, 47), (47, 71), (71, 94)]

A rule plans one epoch at a time, from what it has seen of those before: the loss, drift and times reach the host once per epoch, on
every rank the same. One that has seen nothing yet may plan the first stretch alone, look at the drift, and plan the rest (`look`).
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from typing_extensions import override

from deepex.errors import ConfigError

RateOfStep = Callable[[int], float]  # of a step of the epoch

_NEVER: Final = 1e15  # steps: more than there are in an epoch


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


@final
class AdaComm(PeriodRule):
    """H = ⌈√(F / F₀) · H₀⌉, with F the training loss of the last epoch and F₀ of the first (Wang & Joshi 2019): ever shorter."""

    def __init__(self, base: int) -> None:
        self._base, self._losses = base, list[float]()

    @property
    def _period(self) -> int:
        first, now = self._losses or (1.0, 1.0)
        return max(1, math.ceil(min(math.sqrt(max(now, 0.0) / first) * self._base, _NEVER))) if first > 0 else self._base

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


@final
class Quadratic(PeriodRule):
    """H = max(H_base, ⌊(α / η)²⌋), with η the learning rate (QSR: Gu et al. 2024): ever longer as the rate decays."""

    def __init__(self, base: int, alpha: float) -> None:
        self._base, self._alpha = base, alpha
        self._rate: RateOfStep = lambda _step: math.inf

    def _period(self, step: int) -> int:
        rate = self._rate(step)
        return max(self._base, math.floor(min(self._alpha / rate, _NEVER) ** 2) if rate > 0 else self._base)

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


def parse_period(
    period: int | str,
    *,
    base: int = 16,
    alpha: float = 0.02,
    tolerance: float = 0.14,
    longest: int = 256,
    cost: float = 0.0,
    age: int = 1,
    pieces: int = 1,
    hides: bool = False,
) -> PeriodRule:
    """Read a period as a person writes it: 16, "epoch", "4 per epoch" (or "4/epoch"), "1 until 5 then 16", or a rule's name.

    `cost`, `age`, `pieces` and `hides` are for `auto` (auto.py).
    """
    named: dict[object, Callable[[], PeriodRule]] = {
        "epoch": lambda: PerEpoch(1),
        "adacomm": lambda: AdaComm(base),
        "qsr": lambda: Quadratic(base, alpha),
        "auto": lambda: _auto(tolerance=tolerance, longest=longest, cost=cost, age=age, pieces=pieces, hides=hides),
    }

    def parse(text: str) -> PeriodRule | None:
        if match := re.fullmatch(r"(.+?)\s+until\s+(\d{1,18})(?:\s+epochs?)?,?\s+then\s+(.+)", text):
            first, then = parse(match[1]), parse(match[3])
            return Until(first, int(match[2]), then) if first and then else None
        if (match := re.fullmatch(r"(\d{1,18})(\s*(?:per|/)\s*epoch)?", text)) and int(match[1]):
            return PerEpoch(int(match[1])) if match[2] else EverySteps(int(match[1]))
        return named[text]() if text in named else None

    rule = parse(str(int(period)) if isinstance(period, int) else period.strip()) if isinstance(period, int | str) else None
    if rule is None:
        raise ConfigError(
            f"sync.period is {period!r}; it must be a number of steps of at least 1, 'epoch', a number such as '4 per epoch', a "
            "change such as '1 until 5 then 16' (after 5 epochs), or one of adacomm, qsr, auto"
        )
    return rule


def _auto(**settings: Any) -> PeriodRule:
    from deepex.sync.auto import Auto

    return Auto(**settings)


def stretches(rule: PeriodRule, start: int, steps: int) -> list[tuple[int, int]]:
    """The stretches between syncs, from step `start` to the end of the epoch."""
    result = []
    while start < steps:
        stop = rule.next_sync(start, steps)
        result.append((start, stop))
        start = stop
    return result
