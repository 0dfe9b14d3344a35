"""The row of numbers that each rank tells the others at the end of an epoch, by the names of its parts.

layout = RowLayout(train=3, lost=1, drift=None)       # the last part may be of any length
rows = comm.gather_rows(layout.pack(train=sums, lost=[0.0], drift=drift))
layout.of(rows, "train").sum(0)
"""

from collections.abc import Sequence
from typing import final

import torch

from deepex.record import Score
from deepex.record.measure import Measure


@final
class RowLayout:
    """Where each part of a row lies."""

    def __init__(self, **widths: int | None) -> None:
        self._places: dict[str, slice] = {}
        start = 0
        for name, width in widths.items():
            self._places[name] = slice(start, None if width is None else start + width)
            start += width or 0

    def pack(self, **parts: Sequence[float]) -> torch.Tensor:
        """A row of these parts."""
        assert list(parts) == list(self._places), f"parts {list(parts)} in another order than {list(self._places)}"
        row = [value for part in parts.values() for value in part]
        for name, place in self._places.items():
            assert place.stop is None or len(parts[name]) == place.stop - place.start, f"{name} has {len(parts[name])} values"
        return torch.tensor(row, dtype=torch.float64)

    def columns(self, rows: torch.Tensor) -> dict[str, list[list[float]]]:
        """All parts, each as columns: the values of every rank, one after another."""
        every = rows.T.tolist()
        return {name: every[place] for name, place in self._places.items()}

    def of(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """A part of each row."""
        return rows[:, self._places[name]]


def score_of(measures: Sequence[Measure], sums: Sequence[float], seconds: float | None = None) -> Score:
    """The score that sums stand for: of the loss, of each measure, and the number of samples."""
    loss, *totals, count = sums
    samples = round(count)
    values = {measure.name: measure.value(total, samples) for measure, total in zip(measures, totals, strict=True)}
    return Score(loss=loss / samples, samples=samples, measures=values, seconds=seconds)
