"""Writing the samples of a part to files of about one size, converted block by block.

>>> writer = PartWriter(out=Path("packed"), dtype=stored_dtype(source), file_bytes=64 << 20, total=6000)
>>> part = writer.write("train", chosen["train"], moments)

However large the source is, memory holds one file's images and one block.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.manifest import PackedFile, Part
from deepex.data.moments import Moments
from deepex.data.npy import write_npy
from deepex.data.source import Samples, Source
from deepex.data.split import Chosen
from deepex.errors import DataError

Progress = Callable[[int, int], None]

_BLOCK_BYTES = 1 << 20  # of stored values converted at a time: their float64 copy for the moments stays in the cache


@final
@dataclass(kw_only=True)
class PartWriter:
    """Writes the files of parts, and counts the samples over all of them."""

    out: Path
    dtype: np.dtype[Any]
    file_bytes: int
    total: int
    progress: Progress | None = None
    _done: int = field(default=0, init=False)

    def write(self, part: str, picked: Chosen, moments: Moments | None) -> Part:
        """Write one part; `moments`, if given, takes in its images."""
        sample_bytes = math.prod(picked.samples.images.shape[1:]) * self.dtype.itemsize
        per_file = max(1, self.file_bytes // sample_bytes)
        per_block = max(1, _BLOCK_BYTES // sample_bytes)
        files = []
        for number, begin in enumerate(range(0, len(picked.order), per_file)):
            order = picked.order[begin : begin + per_file]
            images = np.empty((len(order), *picked.samples.images.shape[1:]), self.dtype)
            for place, block in _converted(picked.samples, order, self.dtype, per_block):
                images[place] = block
                if moments is not None:
                    moments.add(block)
                self._advance(len(block))
            files.append(self._save(f"{part}-{number:05d}", images, picked.samples.labels, order))
        return Part(count=len(picked.order), files=tuple(files))

    def _save(self, stem: str, images: NDArray[Any], labels: NDArray[np.int64] | None, order: NDArray[np.int64]) -> PackedFile:
        images_name, labels_name = f"{stem}.npy", f"{stem}-labels.npy"
        images_digest = write_npy(self.out / images_name, images)
        if labels is None:
            return PackedFile(images=images_name, count=len(order), images_sha256=images_digest)
        return PackedFile(
            images=images_name,
            labels=labels_name,
            count=len(order),
            images_sha256=images_digest,
            labels_sha256=write_npy(self.out / labels_name, labels[order]),
        )

    def _advance(self, count: int) -> None:
        self._done += count
        if self.progress is not None:
            self.progress(self._done, self.total)


def _converted(
    samples: Samples, order: NDArray[np.int64], dtype: np.dtype[Any], per_block: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Give the samples as `dtype` in blocks, with their places in `order`; a disk reads them in ascending order."""
    places = np.argsort(order)
    for begin in range(0, len(order), per_block):
        place = places[begin : begin + per_block]
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found below
            block = np.ascontiguousarray(samples.images[order[place]], dtype)
        if dtype.kind == "f" and not np.isfinite(block).all():
            raise _not_finite(samples, dtype, per_block)
        yield place, block


def _not_finite(samples: Samples, dtype: np.dtype[Any], per_block: int) -> DataError:
    for begin in range(0, len(samples.images), per_block):
        with np.errstate(over="ignore", invalid="ignore"):
            block = samples.images[begin : begin + per_block].astype(dtype)
        bad = ~np.isfinite(block).reshape(len(block), -1)
        if bad.any():
            first = int(np.argmax(bad.any(axis=1)))
            value = block[first].reshape(-1)[np.argmax(bad[first])]
            return DataError(
                f"{samples.path} has the value {value} in sample {begin + first}; all values must be finite in "
                "float32: mend or remove that sample"
            )
    return DataError(f"{samples.path} changed while it was packed; pack it again")


def stored_dtype(source: Source) -> np.dtype[Any]:
    """uint8 for integers that fit, else float32."""
    arrays = [samples.images for samples in (source.train, source.validation) if samples is not None]
    if any(array.dtype.kind == "f" for array in arrays):
        return np.dtype(np.float32)
    if all(array.dtype in (np.uint8, np.bool_) for array in arrays):
        return np.dtype(np.uint8)
    for array in arrays:
        step = max(1, _BLOCK_BYTES // array[0].nbytes)
        for begin in range(0, len(array), step):
            block = array[begin : begin + step]
            if block.min() < 0 or block.max() > 255:
                return np.dtype(np.float32)
    return np.dtype(np.uint8)
