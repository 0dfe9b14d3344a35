"""The update: mini-batch SGD with momentum, as one fused pass over the arena; LARS on top of it.

    optimiser = Optimiser(config.optim, arena)
    optimiser.update(rate=0.1)

The pass is PyTorch's own fused kernel: weights, gradients and momentum are read once and weights and momentum written once. Where
the arena gathers gradients it runs over flat slices, else over the list of tensors.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from deepex.arena.arena import Arena
from deepex.errors import ConfigError
from deepex.record.table import check_types


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its rate over time.

    `method`: `sgd`, or `lars` (You et al. 2017: each tensor's step is scaled by `trust` · ‖w‖ / (‖g‖ + decay · ‖w‖)).
    Weight decay and LARS leave biases and normalisation layers alone. `scale_batch`: the total batch for which `rate` is meant; the
    rate then grows with the run's total batch, in proportion (`scaling` linear) or with its root (sqrt). `decay_epochs` and `decay`
    belong to the schedule `step`, `power` to `polynomial`, `final` (a fraction of the rate) to `polynomial` and `cosine`.
    """

    method: Literal["sgd", "lars"] = "sgd"
    rate: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    trust: float = 0.001
    schedule: Literal["constant", "step", "polynomial", "cosine"] = "constant"
    warmup_epochs: float = 0.0
    decay_epochs: tuple[float, ...] = ()
    decay: float = 0.1
    power: float = 2.0
    final: float = 0.0
    scale_batch: int = 0
    scaling: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        check_types(self, "optim.")
        rules = (
            ("rate", 0 < self.rate <= 1e12, "above 0 and at most 1e12"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("trust", self.trust > 0, "above 0"),
            ("warmup_epochs", self.warmup_epochs >= 0, "at least 0"),
            ("scale_batch", self.scale_batch >= 0, "at least 0 (0: no scaling)"),
            ("final", 0 <= self.final <= 1, "between 0 and 1, a fraction of the rate"),
            ("decay", 0 < self.decay <= 1, "above 0 and at most 1"),
            ("power", self.power > 0, "above 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"optim.{name} is {getattr(self, name)!r}; it must be {rule}")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov is true with optim.momentum 0: Nesterov needs momentum; set it to 0.9, say")
        if self.schedule == "step" and not self.decay_epochs:
            raise ConfigError("optim.schedule is step without optim.decay_epochs: say when, for example [30, 60, 80]")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Weights that share one weight decay: their places in the list of tensors, or one flat slice of each region."""

    weights: list[torch.Tensor]
    momenta: list[torch.Tensor]
    gradients: list[torch.Tensor] | None  # None: autograd's, which are others in every step
    places: slice
    decay: float


class Optimiser:
    """Updates an arena's weights and momentum from its gradients, in place."""

    def __init__(self, config: OptimConfig, arena: Arena) -> None:
        self._config, self._arena = config, arena
        decays = config.weight_decay > 0 and config.method == "sgd"
        cut = len(arena.layout.decayed) if decays else 0
        self._parts = [
            _make_part(config, arena, slice(start, stop), config.weight_decay if stop <= cut else 0.0)
            for start, stop in pairwise(sorted({0, cut, len(arena.layout.weights)}))
        ]
        self._lars = _Lars(config, arena) if config.method == "lars" else None

    def adapt(self, gradients: list[torch.Tensor]) -> None:
        """Scale the gradients by LARS's trust ratios, in place; nothing for another method."""
        if self._lars is not None:
            self._lars.adapt(gradients)

    def update(self, rate: float) -> None:
        """One update."""
        config, gradients = self._config, self._arena.gradient_tensors()
        self.adapt(gradients)
        for part in self._parts:
            torch._fused_sgd_(
                part.weights,
                [_flat(gradient) for gradient in gradients[part.places]] if part.gradients is None else part.gradients,
                part.momenta,
                weight_decay=part.decay,
                momentum=config.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=config.nesterov,
                maximize=False,
                is_first_step=False,  # momentum starts at zero, so that the first step is like the others
            )
        self._arena.drop_gradients()


@dataclass(frozen=True)
class MomentumAhead:
    """How momentum alone would carry weights on: by −rate · `first` · `velocity` in a step, by `decay` of that in the next one."""

    velocity: torch.Tensor
    first: float
    decay: float

    def ahead(self, steps: int) -> float:
        """How many times rate · velocity that is in so many steps."""
        return self.first * (1 - self.decay**steps) / (1 - self.decay)


def momentum_ahead(config: OptimConfig, arena: Arena) -> MomentumAhead | None:
    """How updates without gradients would go on, but for weight decay; None if they would not."""
    first = config.momentum**2 if config.nesterov else config.momentum
    return MomentumAhead(arena.momentum, first, config.momentum) if config.momentum else None


def _make_part(config: OptimConfig, arena: Arena, places: slice, decay: float) -> _Part:
    if arena.gathers:
        slots = arena.layout.weights[places]
        flat = slice(slots[0].offset, slots[-1].offset + slots[-1].count)
        weights, momenta, gradients = [arena.weights[flat]], [arena.momentum[flat]], [arena.gradients[flat]]
    else:
        weights = [_flat(view) for view in arena.weight_views()[places]]
        momenta, gradients = [_flat(view) for view in arena.momentum_views()[places]], None
    return _Part(weights=weights, momenta=momenta if config.momentum else [], gradients=gradients, places=places, decay=decay)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a vector, whatever the order of its dimensions; the fused kernel copies a permuted one."""
    return tensor.as_strided((tensor.numel(),), (1,))


class _Lars:
    """Scales each gradient by its trust ratio, in place; biases and normalisation layers keep ratio 1."""

    def __init__(self, config: OptimConfig, arena: Arena) -> None:
        self._config = config
        self._weights = arena.weight_views()[: len(arena.layout.decayed)]

    def adapt(self, gradients: list[torch.Tensor]) -> None:
        config, adapted = self._config, gradients[: len(self._weights)]
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
