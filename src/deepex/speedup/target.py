"""A target to measure learning by, where nobody gave one: what every setting came to that learnt at all.

>>> common_target([one_rank, two_ranks])        # each a list of runs, each a list of its epochs
'validation error <= 0.18'

It is chosen after the fact, from the runs themselves, so that each of them has an answer. A target that was set beforehand is
better evidence, and is never replaced.
"""

import math
from collections.abc import Sequence
from typing import Final

from deepex.record import EpochRecord

_LEARNT: Final = 1.5  # a setting with a run that came to more than so many times the best one's value did not learn


def common_target(settings: Sequence[Sequence[Sequence[EpochRecord]]]) -> str | None:
    """The least value, rounded up to two digits, that every run of each setting reached; None if there is none."""
    epochs = [epoch for runs in settings for run in runs for epoch in run]
    if not epochs:
        return None
    part = "validation" if all(epoch.validation is not None for epoch in epochs) else "train"
    measure = "error" if epochs[0].train.error is not None else "rmse"
    came_to = [max(_least(run, part, measure) for run in runs) for runs in settings if runs]
    learnt = [value for value in came_to if value <= _LEARNT * min(came_to)]
    value = max(learnt)
    return f"{part} {measure} <= {_rounded_up(value)}" if math.isfinite(value) else None


def _least(run: Sequence[EpochRecord], part: str, measure: str) -> float:
    values = [epoch.score(part, measure) for epoch in run]
    return min((value for value in values if value is not None), default=math.inf)


def _rounded_up(value: float) -> float:
    if value <= 0 or not math.isfinite(value):
        return value
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(round(math.ceil(value / digit - 1e-9) * digit, 12))
