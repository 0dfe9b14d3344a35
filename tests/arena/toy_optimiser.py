"""An optimiser in one file, as CONTRIBUTING has it for an exercise: Adam without its bias correction.

`damped`: v ← β v + (1 − β) g², m ← 0.9 m + 0.1 g, w ← w − rate · m / (√v + 1e-8). With `optim.memory` 0, v is g².
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.arena.optimiser.base import Optimiser, State
from deepex.record.options import KeyRules, Options


@dataclass(frozen=True, kw_only=True)
class DampedOptions(Options):
    """`memory`: what is left of the squares after a step."""

    memory: float = 0.99

    rules: ClassVar[KeyRules] = {"memory": (lambda value: 0 <= value < 1, "at least 0 and below 1")}


@final
class Damped(Optimiser):
    """For those who have few steps. Each replica keeps its own squares."""

    name = "damped"

    @override
    @classmethod
    def states(cls, config: Any) -> tuple[State, ...]:
        return State("squares", "local"), State("mean")

    @override
    def update(self, rate: float | torch.Tensor) -> None:
        arena, beta = self.arena, self.config.memory
        views = arena.weight_views(), arena.state_views("squares"), arena.state_views("mean"), arena.gradient_tensors()
        for weight, squares, mean, gradient in zip(*views, strict=True):
            squares.mul_(beta).add_((1 - beta) * gradient.square())
            mean.mul_(0.9).add_(0.1 * gradient)
            weight.sub_(rate * mean / (squares.sqrt() + 1e-8))
        arena.drop_gradients()


KIND: Final = Damped
