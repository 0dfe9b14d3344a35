"""`hierarchical`: replicas agree within groups every period, and between groups every `between` periods.

A group is of `group` replicas; those of a node, if 0. Groups of a rank go through a stretch one after another, so that no more than
four slices are needed, however many replicas and groups.

For users: docs/synchronisation.md#hierarchical
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.errors import ConfigError
from deepex.record.options import KeyRules, Options
from deepex.sync.agreement import Agreement
from deepex.sync.how.strategy import AgreementInputs, GroupLevel, Strategy
from deepex.sync.when.rule import Situation


@dataclass(frozen=True, kw_only=True)
class HierarchicalOptions(Options):
    """`group`: the replicas of a group; those of a node, if 0. `between`: the periods between two syncs of all groups."""

    group: int = 0
    between: int = 4

    rules: ClassVar[KeyRules] = {
        "group": (lambda value: value >= 0, "at least 0 (0: the replicas of a node)"),
        "between": (lambda value: value >= 1, "at least 1"),
    }


@final
class Hierarchical(Strategy):
    """The plain mean, on two levels."""

    name = "hierarchical"
    makes_equal = leaves_out = True

    @override
    def check_replicas(self, config: Any, *, replicas: int, per_rank: int) -> None:
        if config.group:
            check_groups([config.group], replicas, per_rank)

    @override
    def situation(self, config: Any) -> Situation:
        return Situation(pieces=config.between)

    @override
    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        return 2 * super().slices(config, per_rank=per_rank, deterministic=deterministic)

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        return inputs.mean()

    @override
    def group_level(self, config: Any, inputs: AgreementInputs) -> GroupLevel | None:
        comm, per_rank = inputs.comm, inputs.per_rank
        size = config.group or per_rank * comm.place.local_size
        sizes = sorted(set(comm.gather(size)))
        try:
            check_groups(sizes, inputs.replicas, per_rank)
        except ConfigError as error:  # every rank finds the same
            raise AgreedError(error) from error
        agreement = inputs.mean(min(size, per_rank))
        near = comm.split(comm.rank * per_rank // size) if size > per_rank else SoloCommunicator()
        return GroupLevel(agreement=agreement, comm=near, size=size, between=config.between)


KIND: Final = Hierarchical


def check_groups(sizes: Sequence[int], replicas: int, per_rank: int) -> None:
    """Refuse groups, of these sizes, into which the replicas cannot be split."""
    size = sizes[0]
    if len(sizes) > 1 or replicas % size or (size % per_rank and per_rank % size):
        raise ConfigError(
            f"sync.group is {' and '.join(map(str, sizes))}, but there are {replicas} replicas, {per_rank} on each rank: groups "
            "must be of equal size (those of a node, if 0), and a group must be of whole ranks or a rank of whole groups; set "
            "sync.group to a number that is"
        )
