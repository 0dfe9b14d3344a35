"""The weights that a captured step computes with: the arena's own, or in bf16 their twin of half the size.

twin = Twin(arena, bf16=True)
weight = twin.of(parameter)       # a bf16 tensor; gradients are taken of it instead of the parameter
twin.cast()                       # after somebody has changed the arena's weights
"""

import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.step.captured.linear_ops import Lane


class Bf16Weights:
    """Stands for an arena's weights. `shadow` is one vector of the same layout; None where the arena's own are used.

    `leaves` has, for each slot of the weights, what its gradient is taken of: the parameter, until its twin was asked for.
    `spare` is memory for the shadow, if it is enough: the arena's gradients, where each is used where it was made. What the shadow
    leaves of it is `room` for weights in another order.
    """

    def __init__(self, arena: Arena, *, bf16: bool, spare: torch.Tensor | None = None) -> None:
        self._arena = arena
        self.shadow: torch.Tensor | None = None
        self._rest: torch.Tensor | None = None
        if bf16:
            self.shadow, self._rest = _shadow(arena.weights, spare)
        self.leaves: list[torch.Tensor] = list(arena.trainable)
        self._places = {id(parameter): place for place, parameter in enumerate(arena.trainable)}
        self._frozen: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor to compute with in place of `parameter`."""
        if self.shadow is None:
            return parameter
        if id(parameter) not in self._places:
            return self._frozen.setdefault(id(parameter), (parameter.detach().to(torch.bfloat16), parameter))[0]
        place = self._places[id(parameter)]
        if self.leaves[place] is parameter:
            self.leaves[place] = self._arena.layout.weights[place].view(self.shadow).requires_grad_()
        return self.leaves[place]

    def room(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Memory like that of its twin that nobody else uses, if there is any."""
        place = self._places.get(id(parameter))
        return None if self._rest is None or place is None else self._arena.layout.weights[place].view(self._rest)

    def cast(self) -> None:
        """Take over the arena's weights."""
        if self.shadow is not None:
            self.shadow.copy_(self._arena.weights)
            for twin, parameter in self._frozen.values():  # these change when a checkpoint is loaded
                twin.copy_(parameter.detach())

    def forget_gradients(self) -> None:
        """Before a step."""
        for leaf, parameter in zip(self.leaves, self._arena.trainable, strict=True):
            leaf.grad = parameter.grad = None

    def gradients(self, lane: Lane) -> list[torch.Tensor]:
        """The gradient for each slot, in the order of the slot's memory; a weight that took no part has zeros.

        A parameter may have one beside its twin's: where a layer that is not fused uses it too.
        """
        found = []
        for leaf, parameter in zip(self.leaves, self._arena.trainable, strict=True):
            gradient = lane.gradient(leaf) if leaf is parameter else lane.gradient(leaf, parameter)
            found.append(torch.zeros_like(leaf) if gradient is None else _like(gradient, leaf))
        return found


def _shadow(weights: torch.Tensor, spare: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for the shadow, and as much again if there is that for nothing."""
    count = weights.numel()
    halves = torch.empty(0) if spare is None else spare.view(torch.bfloat16)
    if halves.numel() < count:
        return torch.zeros_like(weights, dtype=torch.bfloat16), None
    return halves[:count], halves[count : 2 * count] if halves.numel() >= 2 * count else None


def _like(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient with the strides of the leaf; nearly always it has them."""
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    same = all(a == b for size, a, b in strides if size > 1)
    return gradient if same else torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
