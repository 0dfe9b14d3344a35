"""`sgd`: mini-batch SGD with momentum, as one fused pass over the arena.

The pass is PyTorch's own fused kernel: weights, gradients and momentum are read once and weights and momentum written once. Where
the arena gathers gradients it runs over flat slices, else over the list of tensors.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.arena.arena import Arena
from deepex.arena.optimiser.base import MomentumAhead, Optimiser, State
from deepex.arena.optimiser.groups import decay_groups
from deepex.record.options import KeyRules, Options


@dataclass(frozen=True, kw_only=True)
class MomentumOptions(Options):
    """`momentum`: what is left of the velocity after a step; `nesterov`: whether it looks a step ahead."""

    momentum: float = 0.9
    nesterov: bool = False

    rules: ClassVar[KeyRules] = {"momentum": (lambda value: 0 <= value < 1, "at least 0 and below 1")}


@final
class Sgd(Optimiser):
    """v ← momentum · v + g, w ← w − rate · v, as PyTorch's SGD has it. `decay`: another weight decay than the configuration's."""

    name = "sgd"

    def __init__(self, config: Any, arena: Arena, *, decay: float | None = None) -> None:
        super().__init__(config, arena)
        self.decay = self.decay if decay is None else decay
        self._groups = decay_groups(arena, self.decay)

    @override
    @classmethod
    def states(cls, config: Any) -> tuple[State, ...]:
        return (State("momentum"),)  # without momentum too, so that a run can go on with another one

    @override
    @classmethod
    def complaint(cls, config: Any) -> str | None:
        wrong = "optim.nesterov is true with optim.momentum 0: Nesterov needs momentum; set it to 0.9, say"
        return wrong if config.nesterov and config.momentum == 0 else None

    @override
    def ahead(self) -> MomentumAhead | None:
        momentum = self.config.momentum
        first = momentum**2 if self.config.nesterov else momentum
        return MomentumAhead(self.arena.states["momentum"], first, momentum, "momentum") if momentum else None

    @override
    def update(self, rate: float | torch.Tensor) -> None:
        self.apply(self.arena.gradient_tensors(), rate)

    def apply(self, gradients: list[torch.Tensor], rate: float | torch.Tensor) -> None:
        """One update from these gradients, which are the arena's, or stand for those that autograd has made."""
        config = self.config
        for group in self._groups:
            torch._fused_sgd_(
                group.weights,
                group.gradients(gradients),
                group.states["momentum"] if config.momentum else [],
                weight_decay=group.decay,
                momentum=config.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=config.nesterov,
                maximize=False,
                is_first_step=False,  # momentum starts at zero, so that the first step is like the others
            )
        self.arena.drop_gradients()


KIND: Final = Sgd
