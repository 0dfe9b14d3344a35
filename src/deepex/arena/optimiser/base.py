"""What every optimiser says of itself, and does.

    kind = optimisers()["sgd"]
    kind.states(config)                 # what it keeps per weight: the arena has memory for it
    optimiser = kind(config, arena)
    optimiser.update(rate=0.1)

An optimiser's file has its options, its states and its arithmetic. A captured step may have a kernel for it; nobody else knows it
by name. All that it keeps from step to step is in its states, which checkpoints and syncs know of.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from deepex.arena.arena import Arena


@dataclass(frozen=True)
class State:
    """What an optimiser keeps per weight, and what becomes of it at a sync of weights; if "", what `sync.momentum` says."""

    name: str
    policy: Literal["", "average", "reset", "local"] = ""


def state_policies(states: Sequence[State], usual: str) -> dict[str, str]:
    """The policy of each state, in the order of memory: what is averaged comes first, so that what is agreed on is one slice."""
    found = {state.name: state.policy or usual for state in states}
    return dict(sorted(found.items(), key=lambda one: one[1] != "average"))


@dataclass(frozen=True)
class MomentumAhead:
    """How momentum alone would carry weights on: by −rate · `first` · `velocity` in a step, by `decay` of that in the next one.

    `state` is the name of the velocity.
    """

    velocity: torch.Tensor
    first: float
    decay: float
    state: str

    def ahead(self, steps: int) -> float:
        """How many times rate · velocity that is in so many steps."""
        return self.first * (1 - self.decay**steps) / (1 - self.decay)


class Optimiser(ABC):
    """Updates an arena's weights and states from its gradients, in place. `config` is the OptimConfig, with its options.

    `decay` is the weight decay within the update; it leaves biases and normalisation layers alone.
    """

    name: ClassVar[str]
    adapts: ClassVar[bool] = False
    """Whether gradients are changed as a whole, by `adapt`, before any weight is updated."""

    def __init__(self, config: Any, arena: Arena) -> None:
        self.config, self.arena = config, arena
        self.decay: float = config.weight_decay

    @classmethod
    @abstractmethod
    def states(cls, config: Any) -> tuple[State, ...]:
        """What it keeps per weight."""

    @classmethod
    def complaint(cls, config: Any) -> str | None:  # noqa: ARG003 - a contract
        """Why this configuration cannot be, in a sentence; None if it can."""
        return None

    def ahead(self) -> MomentumAhead | None:
        """How updates without gradients would go on, but for weight decay; None if they would not."""
        return None

    def adapt(self, gradients: list[torch.Tensor]) -> None:
        """Change the gradients in place, or put others into the list."""
        return

    @abstractmethod
    def update(self, rate: float | torch.Tensor) -> None:
        """One update. In a captured step the rate is a number on the device, which nothing may wait for."""
