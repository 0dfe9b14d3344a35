"""Medians with bootstrap intervals, and verdicts that a proposal can quote.

    one, four = [[10.1, 10.0], [10.4, 10.2], [9.9, 10.0]], [[2.7, 2.6], [2.8, 2.7], [2.6, 2.7]]     # seconds of epochs, by repeat
    gained = ratio(one, four)       # Interval(value=3.74…, low=3.6…, high=3.9…, repeats=3)
    verdict(gained)                 # "faster by a factor of 3.74 (3.62 to 3.87)"

What is resampled are repeats, and then the epochs within each: epochs of one run resemble each other more than those of the next,
and an interval over epochs alone would be too narrow (Davison & Hinkley, Bootstrap Methods, 3.8). With a single repeat only epochs
are left, and `repeats` says so. With many repeats their medians vary as much as epochs and repeats together, and are drawn alone.
The draws are the same each time.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from deepex.errors import RunError
from deepex.record import EpochRecord

_RESAMPLES: Final = 1000
_COVERED: Final = 0.95
_MANY: Final = 20
Groups = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value, the bounds within which it lies with 95 % confidence, and how many repeats tell."""

    value: float
    low: float
    high: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def steady(epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
    """The epochs whose times count: whole, on the ranks that the run had last; the first, which warms up, only if it is alone."""
    whole = [epoch for epoch in epochs if not epoch.partial and epoch.ranks == epochs[-1].ranks]
    if not whole:
        raise RunError("the run has no whole epoch yet, so there is no time per epoch: let it train one")
    return [epoch for epoch in whole if epoch.epoch > 1] or whole


def middle(groups: Groups) -> Interval:
    """The median over repeats of the medians within each."""
    draw = _drawer(groups)
    drawn = [draw(chance) for chance in _chances()]
    return _interval(_middle(groups), drawn, len(groups))


def ratio(base: Groups, groups: Groups, *, factor: float = 1.0) -> Interval:
    """The median of `base` over that of `groups`, times `factor`."""
    draw_base, draw = _drawer(base), _drawer(groups)
    drawn = [factor * draw_base(chance) / draw(chance) for chance in _chances()]
    return _interval(factor * _middle(base) / _middle(groups), drawn, min(len(base), len(groups)))


def verdict(gained: Interval, better: str = "faster", worse: str = "slower") -> str:
    """Say what a ratio (base over the other, so above 1 is better) shows, and never more than that."""
    if gained.repeats < 2 and gained.low == gained.high:
        return "no evidence: one value each"
    if gained.low > 1:
        return f"{better} by {_by(gained.low, gained.value, gained.high)}"
    if gained.high < 1:
        return f"{worse} by {_by(1 / gained.high, 1 / gained.value, 1 / gained.low)}"
    return f"no difference shown (ratio {gained.low:.3g} to {gained.high:.3g})"


def _by(low: float, value: float, high: float) -> str:
    """Of small differences the percentage, of large ones the factor."""
    if value < 2:
        return f"{_percent(value)} ({_percent(low)} to {_percent(high)})"
    return f"a factor of {value:.3g} ({low:.3g} to {high:.3g})"


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):.3g} %"


def _chances() -> list[random.Random]:
    return [random.Random(seed) for seed in range(_RESAMPLES)]  # noqa: S311 - draws, not secrets


def _drawer(groups: Groups) -> Callable[[random.Random], float]:
    """What draws from `groups` and gives the middle of the draw."""
    if len(groups) > _MANY:
        medians = [median(group) for group in groups]
        return lambda chance: median(chance.choices(medians, k=len(medians)))
    return lambda chance: _middle([chance.choices(group, k=len(group)) for group in chance.choices(groups, k=len(groups))])


def _middle(groups: Groups) -> float:
    return median(median(group) for group in groups)


def _interval(value: float, drawn: list[float], repeats: int) -> Interval:
    drawn.sort()
    tail = round((1 - _COVERED) / 2 * len(drawn))
    return Interval(value=value, low=drawn[tail], high=drawn[-1 - tail], repeats=repeats)
