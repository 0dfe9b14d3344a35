"""What happens to momentum at a sync of weights: `average`, `reset` or `local`.

    policy = make_momentum("local", momentum, replicas_per_rank=8)
    policy.begin(3); …steps of the rank's replica number 3…; policy.end(3)
    policy.agreed()

`average` needs nothing here: momentum is part of the slice that is averaged.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from typing_extensions import override


class MomentumPolicy(ABC):
    """Acts on the arena's momentum around a replica's turn; `index` counts the replicas of this rank."""

    @abstractmethod
    def begin(self, index: int) -> None:
        """Before the turn of replica `index`."""

    @abstractmethod
    def end(self, index: int) -> None:
        """After it."""

    @abstractmethod
    def stored(self) -> list[torch.Tensor]:
        """The momentum of each replica of this rank that a checkpoint must keep beside the arena; empty if none."""


@final
class Averaged(MomentumPolicy):
    """Momentum is in the averaged slice, which restores it too."""

    @override
    def begin(self, index: int) -> None:
        return

    @override
    def end(self, index: int) -> None:
        return

    @override
    def stored(self) -> list[torch.Tensor]:
        return []


@final
class Reset(MomentumPolicy):
    """Every period starts without momentum."""

    def __init__(self, momentum: torch.Tensor) -> None:
        self._momentum = momentum

    @override
    def begin(self, index: int) -> None:
        self._momentum.zero_()

    @override
    def end(self, index: int) -> None:
        return

    @override
    def stored(self) -> list[torch.Tensor]:
        return []


@final
class Local(MomentumPolicy):
    """Each replica keeps its own; those that wait for their turn lie in host memory. A lone replica's stays in the arena."""

    def __init__(self, momentum: torch.Tensor, replicas_per_rank: int) -> None:
        self._momentum = momentum
        waiting = replicas_per_rank if replicas_per_rank > 1 else 0
        self._host = [torch.zeros_like(momentum, device="cpu") for _ in range(waiting)]

    @override
    def begin(self, index: int) -> None:
        if self._host:
            self._momentum.copy_(self._host[index])

    @override
    def end(self, index: int) -> None:
        if self._host:
            self._host[index].copy_(self._momentum)

    @override
    def stored(self) -> list[torch.Tensor]:
        return self._host or [self._momentum]


def make_momentum(policy: str, momentum: torch.Tensor, *, replicas_per_rank: int) -> MomentumPolicy:
    """Build a policy by its name in `sync.momentum`."""
    if policy == "reset":
        return Reset(momentum)
    return Local(momentum, replicas_per_rank) if policy == "local" else Averaged()
