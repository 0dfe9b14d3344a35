"""What a transfer takes, as a line: latency and bandwidth.

>>> latency, bandwidth = fit([(8, 2e-6), (1_000_000, 1e-4), (64_000_000, 6.4e-3)])
>>> f"{latency * 1e6:.1f} us, {bandwidth / 1e9:.1f} GB/s"
'2.0 us, 10.1 GB/s'
"""

import math
from collections.abc import Iterable


def fit(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Fit t = α + n/β to pairs of bytes and seconds; give α in seconds and β in bytes per second, infinite if time does not grow.

    Least squares of the relative deviations: a microsecond off matters at 8 bytes, not at 64 MiB. Neither is ever below zero. There
    must be two sizes or more.
    """
    pairs = [(float(size), seconds) for size, seconds in points]
    if len({size for size, _ in pairs}) < 2:
        raise ValueError(f"a line needs two sizes or more, not {len(pairs)} points of one")
    weights = [1 / seconds**2 for _, seconds in pairs]
    total = sum(weights)
    middle = sum(w * n for w, (n, _) in zip(weights, pairs, strict=True)) / total
    mean = sum(w * t for w, (_, t) in zip(weights, pairs, strict=True)) / total
    spread = sum(w * (n - middle) ** 2 for w, (n, _) in zip(weights, pairs, strict=True))
    slope = sum(w * (n - middle) * (t - mean) for w, (n, t) in zip(weights, pairs, strict=True)) / spread
    latency = mean - slope * middle
    if slope <= 0:
        return mean, math.inf
    if latency < 0:
        moments = ((w * n * n, w * n * t) for w, (n, t) in zip(weights, pairs, strict=True))
        square, product = map(sum, zip(*moments, strict=True))
        return 0.0, square / product
    return latency, 1 / slope


def worst_deviation(points: Iterable[tuple[int, float]], latency: float, bandwidth: float) -> float:
    """How far the farthest point is from the line, as a share of its time: caches and protocols that change with size show here."""
    return max(abs(latency + size / bandwidth - seconds) / seconds for size, seconds in points)
