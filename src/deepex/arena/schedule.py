"""The learning rate over a run: constant, step, polynomial or cosine, with warm-up and linear scaling.

schedule = Schedule(config.optim, epochs=90, total_batch=8192)
schedule.rate(4.5)        # in the middle of the fifth epoch
"""

import math
from collections.abc import Callable

from deepex.arena.optimiser import OptimConfig


class Schedule:
    """The rate as a function of the epochs done, a real number.

    With `scale_batch` the rate is for that total batch and grows with the run's, in proportion (Goyal et al. 2017) or with its root
    (Hoffer et al. 2017). Warm-up rises linearly from zero to the full rate over `warmup_epochs`; the decay runs over the whole of
    `epochs`, as if there were none.
    """

    def __init__(self, config: OptimConfig, *, epochs: int, total_batch: int) -> None:
        self._config, self._epochs = config, epochs
        ratio = total_batch / config.scale_batch if config.scale_batch else 1.0
        self.peak = config.rate * (math.sqrt(ratio) if config.scaling == "sqrt" else ratio)

    def during(self, steps: int) -> Callable[[int, int], float]:
        """The rate as a function of an epoch's number and a step's, of `steps` in an epoch: that of the middle of the step."""
        return lambda epoch, step: self.rate(epoch + (step + 0.5) / steps)

    def rate(self, epoch: float) -> float:
        """The rate after `epoch` epochs."""
        config = self._config
        factor = self._decay(epoch)
        if epoch < config.warmup_epochs:
            factor *= epoch / config.warmup_epochs
        return self.peak * factor

    def _decay(self, epoch: float) -> float:
        """The share of the peak rate that is left."""
        config = self._config
        done = min(epoch / self._epochs, 1.0)
        match config.schedule:
            case "constant":
                return 1.0
            case "step":
                return math.pow(config.decay, sum(epoch >= boundary for boundary in config.decay_epochs))
            case "polynomial":
                return config.final + (1.0 - config.final) * math.pow(1.0 - done, config.power)
            case "cosine":
                return config.final + (1.0 - config.final) * 0.5 * (1.0 + math.cos(math.pi * done))
