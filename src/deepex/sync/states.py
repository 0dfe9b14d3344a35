"""What happens at a sync of weights to what an optimiser keeps per weight: `average`, `reset` or `local`.

    states = make_states({"momentum": "local"}, arena.states, replicas_per_rank=8)
    states.begin(3); …steps of the rank's replica number 3…; states.end(3)
    states.stored()["momentum"]

`average` needs nothing here: such a state is part of the slice that is averaged.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import final

import torch
from typing_extensions import override


class StatePolicy(ABC):
    """Acts on a state in the arena around a replica's turn; `index` counts the replicas of this rank."""

    def begin(self, index: int) -> None:  # noqa: B027 - most do nothing
        """Before the turn of replica `index`."""

    def end(self, index: int) -> None:  # noqa: B027 - as above
        """After it."""

    @abstractmethod
    def stored(self) -> list[torch.Tensor]:
        """The state of each replica of this rank that a checkpoint must keep beside the arena; empty if none."""


@final
class Averaged(StatePolicy):
    """The state is in the averaged slice, which restores it too."""

    @override
    def stored(self) -> list[torch.Tensor]:
        return []


@final
class Reset(StatePolicy):
    """Every period starts without it."""

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state

    @override
    def begin(self, index: int) -> None:
        self._state.zero_()

    @override
    def stored(self) -> list[torch.Tensor]:
        return []


@final
class Local(StatePolicy):
    """Each replica keeps its own; those that wait for their turn lie in host memory. A lone replica's stays in the arena."""

    def __init__(self, state: torch.Tensor, replicas_per_rank: int) -> None:
        self._state = state
        waiting = replicas_per_rank if replicas_per_rank > 1 else 0
        self._host = [torch.zeros_like(state, device="cpu") for _ in range(waiting)]

    @override
    def begin(self, index: int) -> None:
        if self._host:
            self._state.copy_(self._host[index])

    @override
    def end(self, index: int) -> None:
        if self._host:
            self._host[index].copy_(self._state)

    @override
    def stored(self) -> list[torch.Tensor]:
        return self._host or [self._state]


@final
class ReplicaStates:
    """All states of an optimiser, by name."""

    def __init__(self, policies: dict[str, StatePolicy]) -> None:
        self._policies = policies

    def begin(self, index: int) -> None:
        """Before the turn of replica `index`."""
        for policy in self._policies.values():
            policy.begin(index)

    def end(self, index: int) -> None:
        """After it."""
        for policy in self._policies.values():
            policy.end(index)

    def stored(self) -> dict[str, list[torch.Tensor]]:
        """Those that a checkpoint must keep beside the arena, of each replica of this rank."""
        return {name: tensors for name, policy in self._policies.items() if (tensors := policy.stored())}


def make_states(policies: Mapping[str, str], states: Mapping[str, torch.Tensor], *, replicas_per_rank: int) -> ReplicaStates:
    """Build the policy of each state by its name."""
    return ReplicaStates({name: _make(policy, states[name], replicas_per_rank) for name, policy in policies.items()})


def _make(policy: str, state: torch.Tensor, replicas_per_rank: int) -> StatePolicy:
    if policy == "reset":
        return Reset(state)
    return Local(state, replicas_per_rank) if policy == "local" else Averaged()
