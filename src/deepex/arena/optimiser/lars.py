"""`lars`: SGD on gradients that are scaled layer by layer, for large batches (You et al. 2017)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.arena.arena import Arena
from deepex.arena.optimiser.base import MomentumAhead, Optimiser, State
from deepex.arena.optimiser.sgd import Sgd
from deepex.record.options import KeyRules, Options


@dataclass(frozen=True, kw_only=True)
class LarsOptions(Options):
    """`trust`: each tensor's step is scaled by `trust` · ‖w‖ / (‖g‖ + decay · ‖w‖)."""

    trust: float = 0.001

    rules: ClassVar[KeyRules] = {"trust": (lambda value: value > 0, "above 0")}


@final
class Lars(Optimiser):
    """Scales each gradient by its trust ratio, in place, before SGD; biases and normalisation layers keep ratio 1."""

    name = "lars"
    adapts = True

    def __init__(self, config: Any, arena: Arena) -> None:
        super().__init__(config, arena)
        self.decay = 0.0  # it is in the adapted gradients
        self._sgd = Sgd(config, arena, decay=0.0)
        self._weights = arena.weight_views()[: len(arena.layout.decayed)]

    @override
    @classmethod
    def states(cls, config: Any) -> tuple[State, ...]:
        return Sgd.states(config)

    @override
    @classmethod
    def complaint(cls, config: Any) -> str | None:
        return Sgd.complaint(config)

    @override
    def ahead(self) -> MomentumAhead | None:
        return self._sgd.ahead()

    @override
    def update(self, rate: float | torch.Tensor) -> None:
        gradients = self.arena.gradient_tensors()
        self.adapt(gradients)
        self._sgd.apply(gradients, rate)

    @override
    def adapt(self, gradients: list[torch.Tensor]) -> None:
        config, adapted = self.config, gradients[: len(self._weights)]
        if not adapted:
            return
        if len({gradient.data_ptr() for gradient in adapted}) < len(adapted):  # autograd may give one to two weights
            gradients[: len(adapted)] = adapted = [gradient.clone() for gradient in adapted]
        weights = torch.stack(torch._foreach_norm(self._weights))
        norms = torch.stack(torch._foreach_norm(adapted))
        ratios = config.trust * weights / (norms + config.weight_decay * weights)
        ratios = torch.where((weights > 0) & (norms > 0), ratios, 1.0)
        if config.weight_decay:
            torch._foreach_add_(adapted, self._weights, alpha=config.weight_decay)
        torch._foreach_mul_(adapted, list(ratios.unbind()))


KIND: Final = Lars
