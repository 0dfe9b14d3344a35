"""The update: mini-batch SGD with momentum, as one fused pass over the arena; LARS on top of it.

    optimiser = Optimiser(config.optim, arena)
    optimiser.update(rate=0.1)

The pass is PyTorch's own fused kernel (`torch.optim.sgd.sgd(fused=True)`) on flat slices: weights, gradients and momentum are read
once and weights and momentum written once.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch.optim.sgd import sgd

from deepex.engine.arena import Arena
from deepex.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its rate over time.

    `method`: `sgd`, or `lars` (You et al. 2017: each tensor's step is scaled by `trust` · ‖w‖ / (‖g‖ + decay · ‖w‖)).
    Weight decay and LARS leave biases and normalisation layers alone. `scale_batch`: the total batch for which `rate` is meant; the
    rate then grows in proportion to the run's total batch. `decay_epochs` and `decay` belong to the schedule `step`, `power` to
    `polynomial`, `final` (a fraction of the rate) to `polynomial` and `cosine`.
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

    def __post_init__(self) -> None:
        rules = (
            ("rate", self.rate > 0, "above 0"),
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


class Optimiser:
    """Updates an arena's weights and momentum from its gradients, in place."""

    def __init__(self, config: OptimConfig, arena: Arena) -> None:
        self._config, self._arena = config, arena
        decays = config.weight_decay > 0 and config.method == "sgd"
        edges = sorted({0, arena.num_decayed, arena.weights.numel()} if decays else {0, arena.weights.numel()})
        self._parts = [
            (slice(start, stop), config.weight_decay if decays and stop <= arena.num_decayed else 0.0)
            for start, stop in pairwise(edges)
        ]
        self._lars = _Lars(config, arena) if config.method == "lars" else None

    def update(self, rate: float) -> None:
        """One update."""
        if self._lars is not None:
            self._lars.adapt()
        for part, decay in self._parts:
            self._pass(part, decay, rate)

    def _pass(self, part: slice, decay: float, rate: float) -> None:
        config, arena = self._config, self._arena
        momentum = arena.momentum[part] if config.momentum else None
        with torch.no_grad():
            sgd(
                [arena.weights[part]],
                [arena.gradients[part]],
                [momentum],
                foreach=False,
                fused=True,
                weight_decay=decay,
                momentum=config.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=config.nesterov,
                maximize=False,
            )


class _Lars:
    """Scales each gradient by its trust ratio, in place; biases and normalisation layers keep ratio 1."""

    def __init__(self, config: OptimConfig, arena: Arena) -> None:
        self._config, self._arena = config, arena
        adapted = len(arena.layout.decayed)
        self._weights, self._gradients = arena.weight_views()[:adapted], arena.gradient_views()[:adapted]

    @torch.no_grad()
    def adapt(self) -> None:
        config = self._config
        if not self._weights:
            return
        weights = torch.stack(torch._foreach_norm(self._weights))
        gradients = torch.stack(torch._foreach_norm(self._gradients))
        ratios = config.trust * weights / (gradients + config.weight_decay * weights)
        ratios = torch.where((weights > 0) & (gradients > 0), ratios, 1.0)
        if config.weight_decay:
            decayed = slice(0, self._arena.num_decayed)
            self._arena.gradients[decayed].add_(self._arena.weights[decayed], alpha=config.weight_decay)
        torch._foreach_mul_(self._gradients, list(ratios.unbind()))
