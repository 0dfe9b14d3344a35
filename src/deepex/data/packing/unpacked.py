"""Samples on their way from a source that is read in order to files that are shuffled.

A compressed chunk, a trajectory or the patterns of one specimen would be read again for every shuffled file that needs a sample of
it. So such a source is first written in its own order, converted, and shuffled from there; the disk holds the dataset twice
meanwhile.
"""

from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.npy import map_npy, remember
from deepex.data.packing.writer import FileReport
from deepex.data.source.base import Bad, Images


@final
class Unpacked(Images):
    """The samples `numbers` of `images` (ascending), as the files of `reports` hold them one after another."""

    def __init__(self, images: Images, numbers: NDArray[np.int64], directory: Path, reports: list[FileReport], dtype: str) -> None:
        self.count, self.shape, self.dtype, self.labels = images.count, images.shape, np.dtype(dtype), images.labels
        self.description = images.description
        self._numbers, self._directory = numbers, directory
        self._names = [report.images for report in reports]
        self._bounds = np.cumsum([0, *(report.count for report in reports)])
        missing = [bound + np.array(r.missing, np.int64) for r, bound in zip(reports, self._bounds, strict=False)]
        self._missing = np.concatenate([*missing, np.empty(0, np.int64)])
        self._maps: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        rows = np.searchsorted(self._numbers, numbers)
        cuts = np.searchsorted(rows, self._bounds)
        for k in np.flatnonzero(np.diff(cuts)):
            here = slice(cuts[k], cuts[k + 1])
            np.take(self._map(self._names[k]), rows[here] - self._bounds[k], axis=0, out=out[here], mode="clip")
        lost = np.flatnonzero(np.isin(rows, self._missing))
        return [Bad(int(place), self.name(int(numbers[place])), "") for place in lost]

    @override
    def name(self, number: int) -> str:
        return f"sample {number}"

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._maps:
            remember(self._maps, name, map_npy(self._directory / name))
        return self._maps[name]
