"""What a run says about synchronisation: `--set sync.period=16 --set sync.momentum=reset`, or `--set sync=auto`.

config = SyncConfig(strategy="elastic", elasticity=0.5)
config.kind.makes_equal     # a trait of the strategy
config.rule()               # the rule for the period
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from deepex.errors import ConfigError
from deepex.record.options import KeyRules, Options, check_rules
from deepex.record.table import check_types
from deepex.sync.how import strategies, strategy_options
from deepex.sync.how.strategy import Strategy
from deepex.sync.outer import outer_steps
from deepex.sync.when import read_period, rule_options
from deepex.sync.when.rule import PeriodRule
from deepex.sync.wire import wires

if TYPE_CHECKING:
    StrategyName: TypeAlias = str
    OuterName: TypeAlias = str
    WireName: TypeAlias = str
else:
    StrategyName = Literal[tuple(strategies())]
    OuterName = Literal[("none", *outer_steps())]
    WireName = Literal[("fp32", *wires())]


@dataclass(frozen=True, kw_only=True)
class SyncKeys(Options):
    """When and how replicas agree. docs/synchronisation.md tells which is for what.

    `strategy`: one of `sync/how`; `auto` is the best that is known. `period`: steps between two syncs, `epoch`, `4 per epoch`,
    `1 until 5 then 16` (of epochs: post-local SGD), or a rule of `sync/when`. The end of an epoch always syncs: validation,
    checkpoints and the rules that end a run need weights that all replicas share. Left out, it is the strategy's usual one.
    `momentum`, at a sync of weights: `average` it like the weights (twice the bytes, and afterwards the replicas are equal in every
    respect), `reset` it to zero, or keep it `local` to each replica; so too what else an optimiser keeps, if it does not differ.
    `outer`: an optimiser over syncs, one of `sync/outer`, with `outer_rate` and `outer_momentum` (0: the usual ones).
    `wire`: what is sent of a weight: `fp32`, `bf16` or `int8`, with error feedback.
    """

    strategy: StrategyName = "weights"
    period: int | str | None = None
    momentum: Literal["average", "reset", "local"] = "average"
    outer: OuterName = "none"
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    wire: WireName = "fp32"

    rules: ClassVar[KeyRules] = {
        "outer_rate": (lambda value: value >= 0, "at least 0 (0: the usual one)"),
        "outer_momentum": (lambda value: 0 <= value < 1, "at least 0 (0: the usual one) and below 1"),
    }


_KINDS: tuple[type[Options], ...] = (*rule_options(), *strategy_options())
if TYPE_CHECKING:

    class _AllKeys(SyncKeys):
        """The keys of `SyncKeys`, and whatever else the rules and strategies declare."""

        def __init__(self, **keys: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    _AllKeys = type("_AllKeys", (*_KINDS, SyncKeys), {})  # SyncKeys comes last here, so that its fields come first


@dataclass(frozen=True, kw_only=True)
class SyncConfig(_AllKeys):
    """All keys of `sync.*`: those of `SyncKeys`, and those that the period rules and strategies declare in their files."""

    def __post_init__(self) -> None:
        check_types(self, "sync.")
        check_rules(self, (SyncKeys, *_KINDS), "sync.")
        self.rule()
        if complaint := self.kind.complaint(self):
            raise ConfigError(complaint)
        every = strategies().values()
        if self.outer != "none" and not self.kind.makes_equal:
            fitting = " and ".join(kind.name for kind in every if kind.makes_equal)
            raise ConfigError(
                f"sync.outer is {self.outer} with sync.strategy {self.strategy}: outer momentum steps from one agreement to the "
                f"next, and is for {fitting}; leave it out, or change the strategy"
            )
        if self.wire != "fp32" and not self.kind.codable:
            fitting = " and ".join(kind.name for kind in every if kind.codable)
            raise ConfigError(f"sync.wire is {self.wire} with sync.strategy {self.strategy}: only {fitting} are coded; use fp32")

    @property
    def kind(self) -> Strategy:
        """The strategy."""
        return strategies()[self.strategy]

    def rule(self) -> PeriodRule:
        """The rule for the period, which has seen nothing yet."""
        period = self.kind.usual_period if self.period is None else self.period
        return read_period(period, self, self.kind.situation(self))

    @property
    def overlaps(self) -> bool:
        """Whether a thread communicates while another computes."""
        return self.kind.overlaps(self)
