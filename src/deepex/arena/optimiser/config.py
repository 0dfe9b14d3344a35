"""What a run says about its optimiser: `--set optim.rate=0.1 --set optim.weight_decay=1e-4`, or `--set optim=lars`.

config = OptimConfig(method="lars", trust=0.01)
config.policies("average")      # {"momentum": "average"}: what it keeps per weight, and what becomes of that at a sync
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from deepex.arena.optimiser import optimiser_options, optimisers
from deepex.arena.optimiser.base import Optimiser, state_policies
from deepex.arena.schedule import ScheduleOptions, schedule_complaint
from deepex.errors import ConfigError
from deepex.record.options import KeyRules, Options, check_rules
from deepex.record.table import check_types

if TYPE_CHECKING:
    MethodName: TypeAlias = str
else:
    MethodName = Literal[tuple(optimisers())]


@dataclass(frozen=True, kw_only=True)
class OptimKeys(Options):
    """`method`: one of `arena/optimiser`. Weight decay leaves biases and normalisation layers alone, whatever the method."""

    method: MethodName = "sgd"
    weight_decay: float = 0.0

    rules: ClassVar[KeyRules] = {"weight_decay": (lambda value: value >= 0, "at least 0")}


_KINDS: tuple[type[Options], ...] = (*optimiser_options(), ScheduleOptions, OptimKeys)
if TYPE_CHECKING:

    class _AllKeys(OptimKeys, ScheduleOptions):
        """The common keys, and whatever else the optimisers declare."""

        def __getattr__(self, name: str) -> Any: ...
else:
    _AllKeys = type("_AllKeys", _KINDS, {})  # the fields of what comes last here are first


@dataclass(frozen=True, kw_only=True)
class OptimConfig(_AllKeys):
    """All keys of `optim.*`: those of every method, those of the rate over time, and those that optimisers declare."""

    if TYPE_CHECKING:

        def __init__(self, **keys: Any) -> None: ...

    def __post_init__(self) -> None:
        check_types(self, "optim.")
        check_rules(self, _KINDS, "optim.")
        if complaint := self.kind.complaint(self) or schedule_complaint(self):
            raise ConfigError(complaint)

    @property
    def kind(self) -> type[Optimiser]:
        """The optimiser."""
        return optimisers()[self.method]

    def policies(self, usual: str) -> dict[str, str]:
        """What becomes of each state at a sync of weights, in the order of memory; `usual` is what `sync.momentum` says."""
        return state_policies(self.kind.states(self), usual)
