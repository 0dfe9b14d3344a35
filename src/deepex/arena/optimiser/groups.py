"""The weights of an arena as fused kernels take them: by their weight decay, and in one piece where that is possible.

for group in decay_groups(arena, decay=1e-4):
    torch._fused_sgd_(group.weights, group.gradients(arena.gradient_tensors()), group.states["momentum"], …)
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from deepex.arena.arena import Arena


@dataclass(frozen=True, kw_only=True)
class DecayGroup:
    """Weights that share one weight decay: their places in the list of tensors, or one flat slice of each region."""

    weights: list[torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    gathered: list[torch.Tensor] | None  # None: gradients are autograd's, which are others in every step
    places: slice
    decay: float

    def gradients(self, every: list[torch.Tensor]) -> list[torch.Tensor]:
        """Its own of the arena's."""
        return [_flat(gradient) for gradient in every[self.places]] if self.gathered is None else self.gathered


def decay_groups(arena: Arena, decay: float) -> list[DecayGroup]:
    """All weights of the arena: those that decay, and the others."""
    cut = len(arena.layout.decayed) if decay > 0 else 0
    bounds = pairwise(sorted({0, cut, len(arena.layout.weights)}))
    return [_group(arena, slice(start, stop), decay if stop <= cut else 0.0) for start, stop in bounds]


def _group(arena: Arena, places: slice, decay: float) -> DecayGroup:
    if arena.gathers:
        slots = arena.layout.weights[places]
        flat = slice(slots[0].offset, slots[-1].offset + slots[-1].count)
        weights, gathered = [arena.weights[flat]], [arena.gradients[flat]]
        states = {name: [state[flat]] for name, state in arena.states.items()}
    else:
        weights, gathered = [_flat(view) for view in arena.weight_views()[places]], None
        states = {name: [_flat(view) for view in arena.state_views(name)[places]] for name in arena.states}
    return DecayGroup(weights=weights, states=states, gathered=gathered, places=places, decay=decay)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a vector, whatever the order of its dimensions; the fused kernel copies a permuted one."""
    return tensor.as_strided((tensor.numel(),), (1,))
