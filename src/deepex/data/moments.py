"""Mean, deviation, least and greatest value of images, in one pass and in blocks.

Blocks are joined by the formula of Chan, Golub and LeVeque (1979), which keeps the digits that a sum of squares loses.

>>> moments = Moments(num_channels=1)
>>> moments.add(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
>>> moments.scaled(0, 255)
([0.5], [0.5])
"""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
class Moments:
    """The moments of each channel of all blocks (n, height, width, channels) that were added, in float64."""

    def __init__(self, num_channels: int) -> None:
        self.low = np.inf
        self.high = -np.inf
        self._count = 0
        self._mean = np.zeros(num_channels)
        self._squares = np.zeros(num_channels)  # of the differences from the mean, summed

    def add(self, block: NDArray[Any]) -> None:
        """Take in a block; it should be small, as a float64 copy of it is made."""
        values = block.reshape(-1, block.shape[-1]).T.astype(np.float64, order="C")
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        num_new = values.shape[1]
        mean = values.mean(axis=1)
        values -= mean[:, np.newaxis]
        total, delta = self._count + num_new, mean - self._mean
        self._squares += np.einsum("cn,cn->c", values, values) + delta**2 * (self._count * num_new / total)
        self._mean += delta * (num_new / total)
        self._count = total

    def scaled(self, low: float, high: float) -> tuple[list[float], list[float]]:
        """Give mean and deviation after mapping `low`..`high` to 0..1; the deviation of a constant channel is 1."""
        mean = (self._mean - low) / (high - low)
        deviation = np.sqrt(self._squares / max(self._count, 1)) / (high - low)
        # Sums of equal float32 values are exact in float64, so a constant channel has exactly 0 here.
        return mean.tolist(), np.where(deviation > 0, deviation, 1.0).tolist()
