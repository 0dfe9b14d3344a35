"""Where a run stops, and what a learning speedup is measured to.

>>> Target.parse("validation error <= 0.1")
Target(part='validation', measure='error', value=0.1)
"""

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from deepex.errors import ConfigError
from deepex.record.measure import LOSS, Measure
from deepex.record.run import EpochRecord

_PARTS: Final = ("train", "validation")


@dataclass(frozen=True)
class Target:
    """Where to stop: the first epoch whose `measure` over `part` is at most `value`, or at least, if `rises`.

    Written `validation error <= 0.1`, `validation iou >= 0.8`.
    """

    part: str
    measure: str
    value: float
    rises: bool = False

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read a target as a person writes it; without a part it is the training part, as in the paper."""
        match = re.fullmatch(r"(?:(train|validation)\s+)?([A-Za-z_]\w*)\s*(<=|<|>=|>|=|:|\s)\s*([-+.\deE]+)", text.strip())
        with suppress(ValueError):
            if match and match[2] not in _PARTS and math.isfinite(value := float(match[4])):
                return cls(part=match[1] or "train", measure=match[2], value=value, rises=match[3].startswith(">"))
        raise ConfigError(
            f"target is {text!r}; it must be [train|validation] MEASURE <= NUMBER, or >= where more is better, for example "
            "'validation error <= 0.1'"
        )

    def check(self, measures: Sequence[Measure], task: str) -> None:
        """Raise ConfigError unless it is of one of these measures of a task, or of its loss, and of a value that can be."""
        known = {measure.name: measure for measure in (LOSS, *measures)}
        if self.measure not in known:
            raise ConfigError(f"target is {str(self)!r}, but the task {task} measures {' and '.join(known)}")
        measure = known[self.measure]
        if measure.least is not None and self.value < measure.least:
            raise ConfigError(
                f"target is {str(self)!r}, but {measure.name} is never below {measure.least:g}: choose a value of at least that"
            )
        if self.rises != (measure.better == "higher"):
            sign = ">=" if measure.better == "higher" else "<="
            raise ConfigError(f"target is {str(self)!r}, but {measure.name} is better the {measure.better} it is: write {sign}")

    def reached(self, epoch: EpochRecord) -> bool:
        """Whether an epoch reached it."""
        value = epoch.score(self.part, self.measure)
        return value is not None and (value >= self.value if self.rises else value <= self.value)

    def epochs(self, records: Iterable[EpochRecord]) -> int | None:
        """How many epochs it took to reach the target; None if it was not reached."""
        return next((epoch.epoch for epoch in records if self.reached(epoch)), None)

    def __str__(self) -> str:
        return f"{self.part} {self.measure} {'>=' if self.rises else '<='} {self.value!r}"
