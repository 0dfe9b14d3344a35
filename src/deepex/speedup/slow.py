"""Which ranks hold the others up: in what phase, always or once, and what mending it would save.

    for found in slow_ranks(RunDirectory.open(path).epochs()):
        found.rank, found.phase, found.chronic, found.saved_seconds

Compute phases hold no collective, so a slow rank has long phases of its own and the others a long `sync`. A rank's own time is
input, forward, backward and update together; its excess is how far that lies above the median of the other ranks in the same
epoch. A rank is slow *always* (chronic) if its median excess over the steady epochs stands out of the other ranks' and out of the
noise, and *once* if single epochs stand out of the rank's own. All scales are medians of absolute deviations, which one slow rank
does not move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Final

from deepex.record import EpochRecord
from deepex.speedup.statistics import steady

_OWN: Final = ("input", "forward", "backward", "update")
_TO_SIGMA: Final = 1.4826  # the standard deviation of normal noise over its median absolute deviation
_FLOOR: Final = 0.08  # less than this share of an epoch is not worth a search, whatever the noise
_FEWEST: Final = 3  # epochs
_MOST: Final = 200  # epochs looked at: enough for any median


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that others waited for. `excess` is a share of what the others needed; `epochs` those in which it stood out.

    `saved_seconds` is what an epoch would be shorter if the rank were like the others: in the median epoch if it is chronic, in
    each of `epochs` (the mean of them) if not.
    """

    rank: int
    phase: str
    chronic: bool
    excess: float
    epochs: tuple[int, ...]
    looked_at: int
    saved_seconds: float
    epoch_seconds: float


def slow_ranks(records: Sequence[EpochRecord]) -> list[SlowRank]:
    """Every rank that stands out, the costliest first. Empty where nothing can be told: one rank, few epochs, no phases."""
    if not records or records[-1].ranks < 2 or all(epoch.partial for epoch in records):
        return []
    epochs = _spread(steady(records))
    own = [[sum(epoch.phases[name][rank] for name in _OWN) for rank in range(epoch.ranks)] for epoch in epochs]
    if len(epochs) < _FEWEST or min(map(max, own)) <= 0:
        return []
    return _found(epochs, own)


def _found(epochs: list[EpochRecord], own: list[list[float]]) -> list[SlowRank]:
    ranks = range(len(own[0]))
    others = [_medians_of_others(row) for row in own]
    excess = [[row[rank] / max(others[at][rank], 1e-12) - 1 for at, row in enumerate(own)] for rank in ranks]
    deviation = [[value - rest for value, rest in zip(line, _medians_of_others(line), strict=True)] for line in excess]
    noise = _TO_SIGMA * median(abs(value) for line in deviation for value in line)
    usual = [median(line) for line in excess]
    least, once = _chronic_threshold(usual, noise, len(epochs)), _once_threshold(noise, len(ranks), len(epochs))
    found = []
    for rank in ranks:
        if usual[rank] > least and sum(value > usual[rank] / 2 for value in excess[rank]) > 0.6 * len(epochs):
            found.append(_describe(epochs, own, others, rank, list(range(len(epochs))), chronic=True))
        else:
            at = [i for i, value in enumerate(deviation[rank]) if value > once and excess[rank][i] > once / 2]
            if at and len(at) <= max(1, len(epochs) // 3):
                found.append(_describe(epochs, own, others, rank, at, chronic=False))
    found = [one for one in found if one.saved_seconds > 0.01 * one.epoch_seconds or one.chronic]
    return sorted(found, key=lambda one: -one.saved_seconds * (one.looked_at if one.chronic else len(one.epochs)))


def _chronic_threshold(usual: Sequence[float], noise: float, epochs: int) -> float:
    """A median of `epochs` noisy values varies by 1.25 noise/√epochs; with four ranks and more, ranks also tell how they differ."""
    of_noise = 5 * 1.25 * noise / sqrt(epochs) * (1 + 2 / epochs)
    centre = median(usual)
    of_ranks = 6 * _TO_SIGMA * median(abs(value - centre) for value in usual) if len(usual) > 3 else 0.0
    return max(_FLOOR, of_noise, of_ranks)


def _once_threshold(noise: float, ranks: int, epochs: int) -> float:
    """Six times the noise, and more where few values tell how large it is."""
    return max(_FLOOR, 6 * noise * (1 + 6 / (epochs * (ranks - 1))))


def _describe(
    epochs: list[EpochRecord], own: list[list[float]], others: list[list[float]], rank: int, at: list[int], *, chronic: bool
) -> SlowRank:
    excess = median(own[i][rank] / max(others[i][rank], 1e-12) - 1 for i in at)
    longer = {name: sum(_longer(epochs[i].phases[name], rank) for i in at) for name in _OWN}
    saved = [max(own[i]) - max(others[i][rank], *(own[i][:rank] + own[i][rank + 1 :])) for i in at]
    return SlowRank(
        rank=rank,
        phase=max(longer, key=lambda name: longer[name]),
        chronic=chronic,
        excess=excess,
        epochs=tuple(epochs[i].epoch for i in at),
        looked_at=len(epochs),
        saved_seconds=median(saved) if chronic else sum(saved) / len(saved),
        epoch_seconds=median(epoch.seconds for epoch in epochs),
    )


def _longer(values: Sequence[float], rank: int) -> float:
    return values[rank] - median([*values[:rank], *values[rank + 1 :]])


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others; one sort for all of them."""
    order = sorted(range(len(values)), key=values.__getitem__)
    line = [values[i] for i in order]
    result, rest = [0.0] * len(values), len(values) - 1
    for place, index in enumerate(order):
        low, high = (rest - 1) // 2, rest // 2
        result[index] = (line[low + (low >= place)] + line[high + (high >= place)]) / 2
    return result


def _spread(epochs: list[EpochRecord]) -> list[EpochRecord]:
    stride = -(-len(epochs) // _MOST)
    return epochs[::stride]
