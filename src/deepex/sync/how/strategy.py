"""What a strategy says of itself, and what it is made with.

    strategy = strategy_of(config)                  # by its name in `sync.strategy`
    strategy.sums_gradients, strategy.makes_equal   # traits: what others must know of it
    agreement = strategy.agree(site)                # its arithmetic

A strategy's file has its options, its traits and its arithmetic; nobody else knows it by name. Strategies have no state: an
`Agreement` has.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement
from deepex.sync.mean import InPlace, SharedArenaMean
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import MakeTotal
from deepex.sync.when.rule import Situation


@dataclass(frozen=True, kw_only=True)
class AgreementInputs:
    """What an agreement is made of: the slice, the communicator, and `make`, which makes sums. `fixed`: they are in fixed point."""

    synced: SyncedSlice
    comm: Communicator
    replicas: int
    make: MakeTotal
    fixed: bool

    @property
    def per_rank(self) -> int:
        """The replicas of each rank."""
        return self.replicas // self.comm.size

    def mean(self, replicas: int | None = None) -> Agreement:
        """The plain mean, of so many replicas of this rank (all, by default)."""
        several = (self.per_rank if replicas is None else replicas) > 1
        return SharedArenaMean(self.synced, self.make(self.synced.agreed)) if several or self.fixed else InPlace(self.synced)


@dataclass(frozen=True, kw_only=True)
class GroupLevel:
    """The level below the whole: groups of `size` replicas that agree among themselves; every so many stretches all do."""

    agreement: Agreement
    comm: Communicator
    size: int
    between: int


class Strategy(ABC):
    """A way for replicas to agree. What takes `config` is told the SyncConfig, in which are this strategy's options."""

    name: ClassVar[str]
    usual_period: ClassVar[int | str] = "epoch"
    sums_gradients: ClassVar[bool] = False
    """Whether a step ends with gradients that replicas agree on, and not with an update."""
    makes_equal: ClassVar[bool] = False
    """Whether a sync makes all replicas equal, so that an outer optimiser may step on from there."""
    codable: ClassVar[bool] = False
    """Whether what it sums may travel coded (`sync.wire`)."""
    leaves_out: ClassVar[bool] = False
    """Whether a replica that goes astray is left out of what is agreed on."""

    def complaint(self, config: Any) -> str | None:
        """Why this configuration cannot be, in a sentence; None if it can."""
        return None

    def check_replicas(self, config: Any, *, replicas: int, per_rank: int) -> None:
        """Raise ConfigError if so many replicas cannot agree so."""
        return

    def situation(self, config: Any) -> Situation:
        """What a period rule must know."""
        return Situation()

    def overlaps(self, config: Any) -> bool:
        """Whether a thread communicates while another computes."""
        return False

    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        """How many times what is agreed on a rank holds beside its arena: sums are of 8 bytes where deterministic."""
        return slices_of_mean(per_rank=per_rank, deterministic=deterministic)

    @abstractmethod
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        """Make the agreement of all replicas. Collective where it needs a communicator of its own."""

    def group_level(self, config: Any, inputs: AgreementInputs) -> GroupLevel | None:
        """The level below, where there is one. Collective."""
        return None


def slices_of_mean(*, per_rank: int, deterministic: bool) -> int:
    """What several replicas of a rank need: what they last agreed, and their sum."""
    return 0 if per_rank == 1 else 3 if deterministic else 2


def slices_of_each(per_rank: int) -> int:
    """What replicas need that differ between syncs, or code what they send: a slice each, and what they have in common."""
    return 4 + per_rank
