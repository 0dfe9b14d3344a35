"""Training on HDF5 as it is, without packing: each rank reads its own part of the files straight into its cache.

    dataset = Hdf5Dataset.open(Path("frames.h5"), Hdf5Config(images="entry/data", labels="entry/class"))
    dataset.part("train").read_file(0, sink)

HDF5 files are often sorted, by class or by time, so that a contiguous range is no fair shard and no fair validation part. Files of
up to 256 MiB in all are dealt sample by sample, in an order that is drawn once, and read in one go in the order of the files.
Larger ones are dealt in blocks of rows (a chunk, or up to a megabyte): a shard is then many blocks from everywhere. What is held
out of them are short bands of rows, whole chunks where these are compressed (split_rows.py). It is an error if that loses a class.
Mean and deviation are those of all train samples, or of bands from all over larger files. There are no checksums: HDF5's own are
checked where the file has them.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds import read_counter
from deepex.data.feeds.read import REQUEST_BYTES, Sink, requests
from deepex.data.manifest import Manifest, Part
from deepex.data.packing.check import class_names
from deepex.data.packing.moments import Moments
from deepex.data.source.base import Images, Source
from deepex.data.source.hdf5 import Hdf5Images, open_hdf5
from deepex.data.source.hdf5_dataset import Stored
from deepex.data.source.layout import AxisOrder
from deepex.data.split_rows import Bands, lost_class, split_rows, spread
from deepex.errors import ConfigError, DataError
from deepex.record.table import check_types

MAGIC: Final = b"\x89HDF\r\n\x1a\n"
SUFFIXES: Final = (".h5", ".hdf5", ".he5", ".nxs", ".hdf")
_SMALL_BYTES: Final = 256 << 20  # of files that are dealt by samples: this much memory is taken while they are read
_FILE_BYTES: Final = 64 << 20  # of larger ones that are read at once
_LEAST_BANDS: Final = 1 << 16
_LEAST_BLOCKS: Final = 1024
_MEASURED: Final = (16, 1024)  # the fewest and the most bands of larger files; between these, 256 MiB
_SEED: Final = 1
_REMEDY: Final = (
    "pack it (deepex data pack), store validation samples beside the others (x_train and x_validation), or train without: "
    "data_options.validation=0"
)


@dataclass(frozen=True, kw_only=True)
class Hdf5Config:
    """Where images and labels are (by default under the usual names); the share held out if there is no validation part.

    `validation_labels`: where the labels of a validation part are, if `labels` says where those of the train part are.

    `scale`: the values that map to 0 and 1; by default 0 to 255 for bytes, and what the measured samples have for others.
    """

    images: str | None = None
    labels: str | None = None
    validation_labels: str | None = None
    layout: AxisOrder | None = None
    validation: float = 0.1
    scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "data_options.")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"data_options.validation is {self.validation}; it must be a share, at least 0 and below 1")
        if self.scale and (len(self.scale) != 2 or not self.scale[0] < self.scale[1]):
            raise ConfigError(f"data_options.scale is {list(self.scale)}; it must be [low, high], low below high")


def find_hdf5(path: Path) -> list[Path]:
    """The HDF5 files that `path` is or has; none if it is something else."""
    if path.is_dir():
        if (path / "manifest.json").exists():
            return []
        # Hidden files are no data: macOS puts one such as ._a.h5 beside each.
        return sorted(one for one in path.iterdir() if one.name.lower().endswith(SUFFIXES) and not one.name.startswith("."))
    if not path.is_file():
        return []
    with path.open("rb", buffering=0) as file:
        read_counter.opened(len(MAGIC))
        return [path] if file.read(len(MAGIC)) == MAGIC or path.name.lower().endswith(SUFFIXES) else []


@final
class Hdf5Dataset:
    """HDF5 files with the face of a packed dataset."""

    def __init__(self, directory: Path, manifest: Manifest, parts: dict[str, "Hdf5Part"]) -> None:
        self.directory, self.manifest, self._parts = directory, manifest, parts

    @classmethod
    def open(cls, path: Path, config: Hdf5Config) -> "Hdf5Dataset":
        """Open the files that `path` is or has, and measure their samples, or some."""
        names: dict[str, Any] = {"images": config.images, "labels": config.labels, "held_labels": config.validation_labels}
        source = open_hdf5(find_hdf5(path), layout=config.layout, **names)
        classes = class_names(source, None)  # first: dealing counts the samples of each class
        parts, how = _deal(source, config.validation, path)
        return cls(path, _describe(path, parts, classes, config, how), parts)

    def part(self, name: str) -> "Hdf5Part":
        """Give the samples of the part `name`."""
        if name not in self._parts:
            raise DataError(f"{self.directory} has no part {name!r}; it has: {', '.join(sorted(self._parts))}")
        return self._parts[name]

    def verify(self, rank: int = 0, size: int = 1, progress: Any = None) -> list[str]:
        """Nothing to compare with."""
        return []

    def missing(self, rank: int = 0, size: int = 1) -> list[str]:
        """Nothing: the files were opened."""
        return []


@final
class Hdf5Part:
    """Samples in the order in which their bands were dealt; `bounds` cut them into pieces that are read at once."""

    def __init__(self, images: Hdf5Images, bands: Bands) -> None:
        self._images, self.bands = images, bands
        self.sample_shape, self.dtype = images.shape, _stored(images.dtype)
        self.sample_bytes = math.prod(self.sample_shape) * self.dtype.itemsize
        self.is_small = _is_small(images)
        self._edges = np.concatenate([[0], np.cumsum(bands.sizes)])  # of each band in the dealt order
        self.count = int(self._edges[-1])
        piece = self._edges[:-1] * self.sample_bytes // (_SMALL_BYTES if self.is_small else _FILE_BYTES)
        self.bounds = np.concatenate([self._edges[:-1][np.diff(piece, prepend=-1) > 0], [self.count]])

    def read_file(self, number: int, sink: Sink, *, span: tuple[int, int] | None = None, verify: bool = False) -> None:
        """Read the samples `span` of piece `number`, or all, into what `sink` gives."""
        begin, end = int(self.bounds[number]), int(self.bounds[number + 1])
        sink.take_labels(self.labels(np.arange(begin, end)))
        first, last = span or (0, end - begin)
        fill = self._collected(begin + first, begin + last) if self.is_small else self._read_blocks
        for low, high in requests(first, last, self.sample_bytes):
            sink.check()
            at = begin + low
            for view in sink.memory(low, high):
                rows = np.frombuffer(view, self.dtype).reshape(-1, *self.sample_shape)
                fill(at, at + len(rows), rows)
                at += len(rows)
            sink.filled(low, high)

    def _read_blocks(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Write the samples `start` up to `stop` of the dealt order into `out`, by ranges that ascend in the files."""
        numbers = self.rows(np.arange(start, stop))
        turns = (np.flatnonzero(np.diff(numbers) < 0) + 1).tolist()
        for first, last in pairwise([0, *turns, len(numbers)]):
            self.read(numbers[first:last], out[first:last])

    def _collected(self, start: int, stop: int) -> Callable[[int, int, NDArray[Any]], None]:
        """Read samples that lie everywhere in the order of the files, once; what comes back hands them out as they were dealt."""
        numbers = self.rows(np.arange(start, stop))
        order = np.argsort(numbers)
        values = np.empty((len(order), *self.sample_shape), self.dtype)
        for low, high in requests(0, len(order), self.sample_bytes):
            self.read(numbers[order[low:high]], values[low:high])
        places = np.empty_like(order)
        places[order] = np.arange(len(order))

        def fill(first: int, last: int, out: NDArray[Any]) -> None:
            np.take(values, places[first - start : last - start], axis=0, out=out, mode="clip")  # "raise" would buffer `out`

        return fill

    def gather(self, indices: NDArray[Any], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        """Write the samples at `indices` (any order) into given arrays."""
        numbers = self.rows(np.asarray(indices, np.int64))
        unique, inverse = np.unique(numbers, return_inverse=True)
        values = np.empty((len(unique), *self.sample_shape), self.dtype)
        self.read(unique, values)
        images_out[:] = values[inverse]
        labels_out[:] = self.labels(indices)

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Read ascending rows of the source; a row that cannot be read ends the run."""
        raw = out if self._images.dtype == self.dtype else np.empty(out.shape, self._images.dtype)
        for bad in self._images.read(numbers, raw):
            raise DataError(f"{bad.name}: {bad.reason}; restore the file, or pack it with --skip-bad")
        if raw is not out:
            out[:] = raw
        if self.dtype.kind == "f" and not np.isfinite(out).all():
            place = int(np.argmax(~np.isfinite(out).reshape(len(out), -1).all(axis=1)))
            raise DataError(
                f"{self._images.name(int(numbers[place]))} has a value that is not finite: mend it, or pack with --skip-bad"
            )

    def labels(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """The labels at `positions` of the dealt order; zeros where there are none."""
        labels = self._images.labels
        return np.zeros(len(positions), np.int64) if labels is None else labels[self.rows(positions)]

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the source at `positions` of the dealt order."""
        band = np.searchsorted(self._edges, positions, side="right") - 1
        numbers: NDArray[np.int64] = self.bands.starts[band] + positions - self._edges[band]
        return numbers


def dealt_rows(shape: tuple[int, ...], dtype: np.dtype[Any], *, band: int, filtered: bool) -> NDArray[np.int64]:
    """The rows of one HDF5 dataset (n, height, width, channels) in the order in which they are dealt, nothing being held out.

    `band` is the rows of a chunk, or 1; `filtered` tells whether chunks are compressed. For whoever writes a file and wants to know
    the order.
    """
    images = Hdf5Images([Stored(Path(), "", shape, dtype, band, filtered)], None, None, "NHWC")
    part, _ = _dealt(images, 0.0)
    return part.rows(np.arange(part.count))


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which type rows are cached: as they are where a network's input is made from it on the device, else float32."""
    if dtype == np.bool_:
        return np.dtype(np.uint8)
    native = dtype.newbyteorder("=")
    return native if native in (np.uint8, np.float16, np.float32) else np.dtype(np.float32)


def _is_small(images: Hdf5Images) -> bool:
    return images.count * math.prod(images.shape) * _stored(images.dtype).itemsize <= _SMALL_BYTES


def _deal(source: Source, share: float, path: Path) -> tuple[dict[str, Hdf5Part], str]:
    """The parts, and how validation samples were found: the files' own, or a share of the others."""
    if source.validation is not None:
        given = {"train": source.train, "validation": source.validation}
        return {name: _dealt(images, 0.0)[0] for name, images in given.items()}, "the files' own"
    train, held = _dealt(source.train, share)
    if not share:
        return {"train": train}, "none, as asked"
    rows, number = int(train.bands.sizes.max()), len(held.bands.sizes)
    if not number:
        raise DataError(
            f"{path} has {train.count} samples in {len(train.bands.sizes)} bands that can only be read whole (compressed chunks), "
            f"too few to hold out a share of {share}; {_REMEDY}"
        )
    if not train.is_small and source.train.labels is not None:
        lost = lost_class(source.train.labels, held.labels(np.arange(held.count)))
        if lost is not None:
            raise DataError(
                f"{path} is sorted: {number} bands of up to {rows} samples would be held out, and class {lost} would be missing "
                f"among these or among the others; {_REMEDY}"
            )
    what = "single samples" if rows == 1 else f"bands of up to {rows} samples"
    return {"train": train, "validation": held}, f"{number} {what}, one from each of as many equal ranges of the files"


def _dealt(images: Images, share: float) -> tuple[Hdf5Part, Hdf5Part]:
    """Deal by samples; or in bands of a 65,536th of the files and blocks of a thousandth, both up to a megabyte or a chunk."""
    assert isinstance(images, Hdf5Images)
    rows = per_block = 1
    if not _is_small(images):
        least = images.band if images.busy else 1  # any part of a chunk that is not compressed can be read on its own
        rows = min(max(least, images.count // _LEAST_BANDS // least * least), images.block)
        per_block = max(1, min(images.count // rows // _LEAST_BLOCKS, images.block // rows))
    train, held = split_rows(images.starts, rows=rows, per_block=per_block, share=share, seed=_SEED)
    return Hdf5Part(images, train), Hdf5Part(images, held)


def _measured(part: Hdf5Part) -> Iterator[NDArray[np.int64]]:
    """Ascending rows to measure, some megabytes at a time: all, or of bands that are spread over the files."""
    order = np.argsort(part.bands.starts)
    starts, sizes = part.bands.starts[order], part.bands.sizes[order]
    if part.is_small:
        yield from (starts[low:high] for low, high in requests(0, part.count, part.sample_bytes))
        return
    random = np.random.default_rng(_SEED)
    number = int(np.clip(_SMALL_BYTES // (int(sizes.max()) * part.sample_bytes), *_MEASURED))
    most = max(1, REQUEST_BYTES // part.sample_bytes)
    for band in spread(len(starts), min(number, len(starts)), random):
        yield starts[band] + spread(int(sizes[band]), min(int(sizes[band]), most), random)


def _describe(path: Path, parts: dict[str, Hdf5Part], classes: tuple[str, ...], config: Hdf5Config, how: str) -> Manifest:
    train = parts["train"]
    moments, num_measured = Moments(train.sample_shape[2]), 0
    for numbers in _measured(train):
        block = np.empty((len(numbers), *train.sample_shape), train.dtype)
        train.read(numbers, block)
        moments.add(block)
        num_measured += len(numbers)
    low, high = config.scale or moments.own_scale(train.dtype)
    mean, deviation = moments.scaled(low, high)
    height, width, channels = train.sample_shape
    labels = np.concatenate([part.labels(np.arange(part.count)) for part in parts.values()])
    dtype: Any = str(train.dtype)  # _stored gave one of those that a manifest knows, and the manifest checks it
    return Manifest(
        name=path.name,
        shape=(channels, height, width),
        dtype=dtype,
        layout="NHWC",
        classes=classes,
        order="dealt",
        seed=_SEED,
        scale=(float(low), float(high)),
        mean=tuple(mean),
        deviation=tuple(deviation),
        parts={name: Part(count=part.count, files=()) for name, part in parts.items()},
        source={
            "kind": "HDF5, read without packing",
            "moments": f"of {num_measured} of {train.count} train samples",
            "validation": how,
            "labels_sha256": hashlib.sha256(labels.tobytes()).hexdigest(),
        },
    )
