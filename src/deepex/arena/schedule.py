"""The learning rate over a run: constant, step, polynomial or cosine, with warm-up and linear scaling.

schedule = Schedule(config.optim, epochs=90, total_batch=8192)
schedule.rate(4.5)        # in the middle of the fifth epoch
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from deepex.record.options import KeyRules, Options


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """The rate over time.

    `scale_batch`: the total batch for which `rate` is meant; the rate then grows with the run's total batch, in proportion
    (`scaling` linear) or with its root (sqrt). `decay_epochs` and `decay` belong to the schedule `step`, `power` to `polynomial`,
    `final` (a fraction of the rate) to `polynomial` and `cosine`.
    """

    rate: float = 0.05
    schedule: Literal["constant", "step", "polynomial", "cosine"] = "constant"
    warmup_epochs: float = 0.0
    decay_epochs: tuple[float, ...] = ()
    decay: float = 0.1
    power: float = 2.0
    final: float = 0.0
    scale_batch: int = 0
    scaling: Literal["linear", "sqrt"] = "linear"

    rules: ClassVar[KeyRules] = {
        "rate": (lambda value: 0 < value <= 1e12, "above 0 and at most 1e12"),
        "warmup_epochs": (lambda value: value >= 0, "at least 0"),
        "scale_batch": (lambda value: value >= 0, "at least 0 (0: no scaling)"),
        "final": (lambda value: 0 <= value <= 1, "between 0 and 1, a fraction of the rate"),
        "decay": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
        "power": (lambda value: value > 0, "above 0"),
    }


def schedule_complaint(config: ScheduleOptions) -> str | None:
    """Why these options cannot be together, in a sentence; None if they can."""
    wrong = "optim.schedule is step without optim.decay_epochs: say when, for example [30, 60, 80]"
    return wrong if config.schedule == "step" and not config.decay_epochs else None


class Schedule:
    """The rate as a function of the epochs done, a real number.

    With `scale_batch` the rate is for that total batch and grows with the run's, in proportion (Goyal et al. 2017) or with its root
    (Hoffer et al. 2017). Warm-up rises linearly from zero to the full rate over `warmup_epochs`; the decay runs over the whole of
    `epochs`, as if there were none.
    """

    def __init__(self, config: ScheduleOptions, *, epochs: int, total_batch: int) -> None:
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
