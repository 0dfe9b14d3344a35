"""The update that a captured step ends with: a kernel made for the optimiser, or the optimiser's own `update`.

    update = CapturedUpdate(optimiser)
    update.gathers                                  # whether gradients must be in the arena before
    update(gradients, twin, rates, cursor)          # at the rate in row `cursor` of `rates`

A kernel reads each gradient where the backward pass has left it, and writes the bf16 twin of the weights in the same pass. An
optimiser without one needs three passes more, and nothing else: its `update` is captured as it is.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from deepex.arena.optimiser.base import Optimiser
from deepex.step.captured.bf16_weights import Bf16Weights
from deepex.step.captured.kernels.update import Gradients, update

Launch = Callable[[Optimiser, Gradients, torch.Tensor | None, torch.Tensor, torch.Tensor], None]


def _sgd(
    optimiser: Optimiser, gradients: Gradients, shadow: torch.Tensor | None, rates: torch.Tensor, cursor: torch.Tensor
) -> None:
    momentum, nesterov = optimiser.config.momentum, optimiser.config.nesterov
    update(gradients, optimiser.arena, shadow, rates, cursor, momentum=momentum, decay=optimiser.decay, nesterov=nesterov)


KERNELS: Final[Mapping[str, Launch]] = {"sgd": _sgd, "lars": _sgd}


class CapturedUpdate:
    """One update. `gathers`: whether it takes the gradients from the arena."""

    def __init__(self, optimiser: Optimiser) -> None:
        self._optimiser, self._kernel = optimiser, KERNELS.get(optimiser.name)
        self.gathers = optimiser.adapts or self._kernel is None
        self._adapted = self.table() if optimiser.adapts else None
        if self._adapted is not None:
            self._adapted.point(optimiser.arena.gradient_tensors())
            self._adapted.send()

    def table(self) -> Gradients:
        """A new table for gradients, which knows which of them decay."""
        return Gradients(self._optimiser.arena, decays=self._optimiser.decay > 0)

    def __call__(self, gradients: Gradients, twin: Bf16Weights, rates: torch.Tensor, cursor: torch.Tensor) -> None:
        """Update the weights, and what stands for them."""
        if self._kernel is None:
            self._optimiser.update(rates.index_select(0, cursor).view(()))
            twin.cast()
            return
        if self._adapted is not None:
            self._optimiser.adapt(self._optimiser.arena.gradient_tensors())
        self._kernel(self._optimiser, self._adapted or gradients, twin.shadow, rates, cursor)
