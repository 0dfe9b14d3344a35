"""Mean, deviation, least and greatest value of images, in one pass and in blocks.

Blocks are joined by the formula of Chan, Golub and LeVeque (1979), which keeps the digits that a sum of squares loses. Bytes are
summed exactly: squares of values around 0 stay below 2^24 over 1,024 pixels, which float32 holds without rounding.

>>> moments = Moments(num_channels=1)
>>> moments.add(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1))
>>> moments.scaled(0, 255)
([0.5], [0.5])
"""

from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

_EXACT_ROWS: Final = 1024
_COLUMNS: Final = 64


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
        """Take in a block; it should be small, as a copy of it in floating point is made."""
        if not block.size:
            return
        self.low, self.high = min(self.low, float(block.min())), max(self.high, float(block.max()))
        rows = block.reshape(-1, block.shape[-1])
        mean, squares = _of_bytes(rows) if block.dtype == np.uint8 else _of_numbers(rows)
        self._join(len(rows), mean, squares)

    def join(self, other: "Moments") -> None:
        """Take in what another has seen."""
        if other._count:
            self.low, self.high = min(self.low, other.low), max(self.high, other.high)
            self._join(other._count, other._mean, other._squares)

    def _join(self, count: int, mean: NDArray[Any], squares: NDArray[Any]) -> None:
        total, delta = self._count + count, mean - self._mean
        self._squares = self._squares + squares + delta**2 * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = total

    def scaled(self, low: float, high: float) -> tuple[list[float], list[float]]:
        """Give mean and deviation after mapping `low`..`high` to 0..1; the deviation of a constant channel is 1."""
        mean = (self._mean - low) / (high - low)
        deviation = np.sqrt(self._squares / max(self._count, 1)) / (high - low)
        # Sums of equal float32 values are exact in float64, so a constant channel has exactly 0 here.
        return mean.tolist(), np.where(deviation > 0, deviation, 1.0).tolist()

    def own_scale(self, dtype: np.dtype[Any]) -> tuple[float, float]:
        """The values that map to 0 and 1 unless others are given: 0 and 255 of bytes, or 0 and 1; else the least and greatest."""
        if dtype == np.uint8:
            return (0.0, 1.0) if self.high <= 1 else (0.0, 255.0)
        low, high = self.low, self.high
        return (low, high) if low < high else (low, low + max(1.0, abs(low)))  # at 1e17, low + 1 is low

    def to_json(self) -> list[Any]:
        """Plain values; `from_json` gives an equal one back."""
        return [self.low, self.high, self._count, self._mean.tolist(), self._squares.tolist()]

    @classmethod
    def from_json(cls, values: list[Any]) -> "Moments":
        """Build it again."""
        made = cls(len(values[3]))
        made.low, made.high, made._count = values[:3]
        made._mean, made._squares = np.array(values[3]), np.array(values[4])
        return made


def _of_numbers(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    values = rows.T.astype(np.float64, order="C")
    mean = values.mean(axis=1)
    values -= mean[:, np.newaxis]
    return mean, np.einsum("cn,cn->c", values, values)


def _of_bytes(rows: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sums down long columns, which BLAS does fast: a column has every 64th pixel of one channel."""
    count, channels = rows.shape
    whole = count // _COLUMNS * _COLUMNS
    parts = [rows[:whole].reshape(-1, _COLUMNS * channels), rows[whole:]]
    sums, squares = np.zeros(channels), np.zeros(channels)
    for part in parts:
        for begin in range(0, len(part), _EXACT_ROWS):
            values = part[begin : begin + _EXACT_ROWS].astype(np.float32)
            values -= 128
            ones = np.ones(len(values), np.float32)
            sums += (ones @ values).reshape(-1, channels).sum(0, dtype=np.float64)
            np.multiply(values, values, out=values)
            squares += (ones @ values).reshape(-1, channels).sum(0, dtype=np.float64)
    return 128 + sums / count, squares - sums**2 / count
