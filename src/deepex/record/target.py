"""Where a run stops, and what a learning speedup is measured to.

>>> Target.parse("validation error <= 0.1")
Target(part='validation', measure='error', value=0.1)
"""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from deepex.errors import ConfigError
from deepex.record.run import EpochRecord


@dataclass(frozen=True)
class Target:
    """Where to stop: the first epoch whose `measure` over `part` is at most `value`. Written `validation error <= 0.1`."""

    part: str
    measure: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read a target as a person writes it; without a part it is the training part, as in the paper."""
        match = re.fullmatch(r"(?:(train|validation)\s+)?(error|rmse|loss)\s*(?:<=|<|=|:|\s)\s*([-+.\deE]+)", text.strip())
        with suppress(ValueError):
            if match and math.isfinite(value := float(match[3])):
                if match[2] != "loss" and value < 0:
                    raise ConfigError(f"target is {text!r}, but {match[2]} is never below 0: choose a value of at least 0")
                return cls(part=match[1] or "train", measure=match[2], value=value)
        raise ConfigError(
            f"target is {text!r}; it must be [train|validation] error|rmse|loss <= NUMBER, for example 'validation error <= 0.1'"
        )

    def reached(self, epoch: EpochRecord) -> bool:
        """Whether an epoch reached it."""
        value = epoch.score(self.part, self.measure)
        return value is not None and value <= self.value

    def epochs(self, records: Iterable[EpochRecord]) -> int | None:
        """How many epochs it took to reach the target; None if it was not reached."""
        return next((epoch.epoch for epoch in records if self.reached(epoch)), None)

    def __str__(self) -> str:
        return f"{self.part} {self.measure} <= {self.value!r}"
