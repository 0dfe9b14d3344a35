"""A target to measure learning by, where nobody gave one: what every setting came to that learnt at all.

>>> common_target([one_rank, two_ranks], error)     # each a list of runs, each a list of its epochs
'validation error <= 0.18'

It is chosen after the fact, from the runs themselves, so that each of them has an answer. A target that was set beforehand is
better evidence, and is never replaced.
"""

import math
from collections.abc import Sequence
from typing import Final

from deepex.record import EpochRecord
from deepex.record.measure import Measure

_LEARNT: Final = 1.5  # a setting with a run that came to more than so many times the best one's value did not learn


def common_target(settings: Sequence[Sequence[Sequence[EpochRecord]]], measure: Measure) -> str | None:
    """The best value, rounded to two digits, that every run of each setting reached; None if there is none."""
    epochs = [epoch for runs in settings for run in runs for epoch in run]
    if not epochs:
        return None
    part = "validation" if all(epoch.validation is not None for epoch in epochs) else "train"
    sign = -1.0 if measure.better == "higher" else 1.0  # of values so turned, less is better
    came_to = [max(_least(run, part, measure.name, sign) for run in runs) for runs in settings if runs]
    learnt = [value for value in came_to if value <= _worst(min(came_to))]
    value = max(learnt)
    if not math.isfinite(value):
        return None
    return f"{part} {measure.name} {'<=' if sign > 0 else '>='} {sign * _rounded_up(value)}"


def _worst(best: float) -> float:
    """What a setting came to that learnt at all."""
    return best * _LEARNT if best >= 0 else best / _LEARNT


def _least(run: Sequence[EpochRecord], part: str, measure: str, sign: float) -> float:
    values = [epoch.score(part, measure) for epoch in run]
    return min((sign * value for value in values if value is not None), default=math.inf)


def _rounded_up(value: float) -> float:
    if value == 0:
        return value
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return float(round(math.ceil(value / digit - 1e-9) * digit, 12))
