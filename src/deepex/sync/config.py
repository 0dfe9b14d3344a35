"""What a run says about synchronisation: `--set sync.period=16 --set sync.momentum=reset`, or `--set sync=auto`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from deepex.errors import ConfigError
from deepex.record.table import check_types
from deepex.sync.auto import Auto
from deepex.sync.period import PeriodRule, parse_period

_OUTER: Final = {  # the usual rate and momentum
    "none": (1.0, 0.0),
    "slowmo": (1.0, 0.5),
    "nesterov": (0.7, 0.9),
    "adam": (0.001, 0.9),
    "trust": (0.02, 0.9),
    "muon": (0.05, 0.9),
}
_MOST_PARTS: Final = 4096
FEW_STEPS: Final = 100  # in an epoch
_LATE: Final = 3  # periods: by so much is a mean older, as drift goes, that comes in the background
_MUON_DISTANCE: Final = 0.2  # its rate times the root of the steps in an epoch: the best for three networks was 0.14 to 0.3 …
_MUON_RATE: Final = 0.04  # … and at most this: in epochs of 5 and 16 steps longer ones learnt less
_LONGEST_OUTER: Final = 6.0  # steps; a guess: in epochs of 8 steps Muon took 6 epochs to where means of SGD were not after 10
_CLEARLY: Final = 0.9  # of the time of learning with syncs that wait: less, and they are hidden
_EQUAL: Final = ("weights", "hierarchical", "auto")  # after whose syncs all replicas are equal


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """When and how replicas agree. docs/synchronisation.md tells which is for what.

    `strategy`: `weights` (local SGD: the mean of the replicas' weights, every period), `gradients` (the classical baseline: the
    mean of the gradients, every step; with `chunks` above 1, on CPUs, they travel in so many pieces while the backward pass is
    still at work), `hierarchical` (within groups of `group` replicas every period, of a node if 0; between them every `between`
    periods), `streaming` (every period one of `parts` parts of the weights, in turn), `background` (the same while training goes
    on: a mean comes `delay` steps later, a period if 0, and replicas are drawn to it by `pull`), `elastic` (replicas are drawn
    to a centre with `elasticity`) or `auto`: the best that is known. That is `weights` with the period `auto`, or `background`
    with it where syncs take so long that this is expected to be faster; where an epoch has fewer than 100 steps, as with many
    replicas, `outer=muon` at every step, unless that takes much longer than the step; and wherever you ask for `outer=muon`.
    `period`: steps between two syncs, `epoch`, `4 per epoch`, `1 until 5 then 16` (of epochs: post-local SGD), or a rule:
    `adacomm`, `qsr`, `auto`. The end of an epoch always syncs: validation, checkpoints and the rules that end a run need weights
    that all replicas share. Left out, it is `epoch`, and 1 for gradients. `base` is the period with which adacomm begins, and the
    shortest of qsr; `alpha` is qsr's. For auto, `tolerance` is the drift, as a share of the weights' norm, with which learning
    takes twice as many epochs, `longest` the longest period, and `cost` how many steps a sync takes (0: it is measured, but not in
    a deterministic run, which must not follow a clock; in the background, one of a part).
    `momentum`, at a sync of weights: `average` it like the weights (twice the bytes, and afterwards the replicas are equal in every
    respect), `reset` it to zero, or keep it `local` to each replica.
    `outer`: an optimiser over syncs, `slowmo`, `nesterov` (DiLoCo's), `adam`, `trust` (each tensor moves by `outer_rate` of its
    norm) or `muon` (so, along an orthogonal direction), with `outer_rate` and `outer_momentum` (0: the usual ones).
    `wire`: what is sent of a weight: `fp32`, `bf16` or `int8`, with error feedback.
    """

    strategy: Literal["weights", "gradients", "hierarchical", "background", "elastic", "streaming", "auto"] = "weights"
    period: int | str | None = None
    base: int = 16
    alpha: float = 0.02
    tolerance: float = 0.14
    longest: int = 256
    cost: float = 0.0
    momentum: Literal["average", "reset", "local"] = "average"
    outer: Literal["none", "slowmo", "nesterov", "adam", "trust", "muon"] = "none"
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    group: int = 0
    between: int = 4
    elasticity: float = 0.9
    pull: float = 1.0
    delay: int = 0
    parts: int = 4
    chunks: int = 1

    def __post_init__(self) -> None:
        check_types(self, "sync.")
        rules = (
            ("base", self.base >= 1, "at least 1"),
            ("alpha", self.alpha > 0, "above 0"),
            ("tolerance", self.tolerance > 0, "above 0, a share of the weights' norm"),
            ("longest", self.longest >= 1, "at least 1"),
            ("cost", self.cost >= 0, "at least 0, in steps (0: it is measured)"),
            ("outer_rate", self.outer_rate >= 0, "at least 0 (0: the usual one)"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "at least 0 (0: the usual one) and below 1"),
            ("group", self.group >= 0, "at least 0 (0: the replicas of a node)"),
            ("between", self.between >= 1, "at least 1"),
            ("elasticity", 0 < self.elasticity <= 1, "above 0 and at most 1"),
            ("pull", 0 < self.pull <= 1, "above 0 and at most 1"),
            ("delay", self.delay >= 0, "at least 0 (0: a period)"),
            ("parts", 1 <= self.parts <= _MOST_PARTS, f"from 1 to {_MOST_PARTS}"),
            ("chunks", 1 <= self.chunks <= _MOST_PARTS, f"from 1 (no overlap) to {_MOST_PARTS}"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"sync.{name} is {getattr(self, name)!r}; it must be {rule}")
        self.rule()
        if self.strategy == "gradients" and self.period not in (None, 1):
            raise ConfigError(
                f"sync.period is {self.period!r}, but gradients are averaged at every step: leave the period out, "
                "or use sync.strategy=weights"
            )
        if self.outer != "none" and self.strategy not in _EQUAL:
            raise ConfigError(
                f"sync.outer is {self.outer} with sync.strategy {self.strategy}: outer momentum steps from one agreement to the "
                f"next, and is for {' and '.join(_EQUAL)}; leave it out, or change the strategy"
            )
        if self.wire != "fp32" and self.strategy not in ("weights", "gradients"):
            raise ConfigError(
                f"sync.wire is {self.wire} with sync.strategy {self.strategy}: only weights and gradients are coded; use fp32"
            )

    def rule(self) -> PeriodRule:
        """The rule for the period, which has seen nothing yet."""
        usual: int | str = {"gradients": 1, "auto": "auto"}.get(self.strategy, "epoch")  # type: ignore[assignment]
        period = usual if self.period is None else self.period
        return parse_period(
            period,
            base=self.base,
            alpha=self.alpha,
            tolerance=self.tolerance,
            longest=self.longest,
            cost=self.cost,
            age={"streaming": self.parts, "background": self.parts + _LATE}.get(self.strategy, 1),
            pieces=self.between if self.strategy == "hierarchical" else 1,
            hides=self.strategy == "background",
        )

    def settled(self, *, replicas: int, steps: int, outer_steps: Callable[[], float]) -> tuple["SyncConfig", str]:
        """What `auto` stands for with so many replicas, and steps in an epoch; and why.

        `outer_steps` tells how many steps a step of Muon takes; it is asked only where it matters.
        """
        if self.strategy != "auto":
            return self, "asked for"
        mean = replace(self, period=self.period or "auto")
        if self.period is not None or self.outer not in ("none", "muon"):
            return mean, "auto: the mean of the weights, with the period or outer step that was asked for"
        rate = self.outer_rate or min(float(f"{_MUON_DISTANCE / math.sqrt(steps):.2g}"), _MUON_RATE)
        muon = replace(self, period=1, outer="muon", outer_rate=rate, momentum="reset")
        if self.outer == "muon":
            return muon, f"auto: Muon, which was asked for, at each of {steps} steps in an epoch"
        if replicas == 1 or steps >= FEW_STEPS:
            return mean, f"auto: {steps} steps in an epoch are enough for the mean of the weights, with a measured period"
        load = outer_steps()
        few = f"auto: {steps} steps in an epoch are few"
        if load > min(_LONGEST_OUTER, FEW_STEPS / steps):
            return mean, f"{few}, but Muon would take as long as {load:.2g} steps: the mean of the weights, with a measured period"
        return muon, f"{few}: Muon at each, which takes as long as {load:.2g} steps"

    @property
    def undecided(self) -> bool:
        """Whether it depends on how long syncs take if they are to be hidden."""
        return self.strategy == "auto" and self.period in (None, "auto") and self.outer == "none"

    def timed(self, *, steps: int, cost: float, part: float) -> tuple["SyncConfig", str] | None:
        """What `auto` stands for with so many steps in an epoch, if it is no longer the mean of the weights; and why.

        `cost` is how many steps a sync of all replicas takes, `part` how many one of a part in the background.
        """
        hidden = replace(self, strategy="background", period="auto", cost=part if self.cost else 0.0)
        waits, hides = self.rule(), hidden.rule()
        assert isinstance(waits, Auto)
        assert isinstance(hides, Auto)
        share = hides.expected(part, steps, last=cost) / waits.expected(cost, steps)
        if share > _CLEARLY or steps < FEW_STEPS:
            return None
        times = f"a sync takes {cost:.2g} steps, one of a part {part:.2g}"
        return hidden, f"auto: {times}: in the background, which is expected to take {share:.0%} of the time of syncs that wait"

    @property
    def overlaps(self) -> bool:
        """Whether a thread communicates while another computes."""
        return self.strategy == "background" or (self.strategy == "gradients" and self.chunks > 1)

    @property
    def outer_step(self) -> tuple[float, float]:
        """Rate and momentum of the outer step."""
        rate, momentum = _OUTER[self.outer]
        return self.outer_rate or rate, self.outer_momentum or momentum
