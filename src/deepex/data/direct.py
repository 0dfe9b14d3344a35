"""Training on HDF5 as it is, without packing: each rank reads its own part of the files straight into its cache.

    dataset = Hdf5Dataset.open(Path("frames.h5"), Hdf5Config(images="entry/data", labels="entry/class"))
    dataset.part("train").read_file(0, sink)

HDF5 files are often sorted, by class or by time, so a contiguous range is no fair shard. They are dealt out in blocks of rows (a
chunk, or up to a megabyte), in an order that is drawn once: a shard is then many blocks from everywhere, each read whole. Mean and
deviation are estimated from some blocks. There are no checksums: HDF5's own are checked where the file has them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds.read import Sink, requests
from deepex.data.manifest import Manifest, Part
from deepex.data.packing.moments import Moments
from deepex.data.source.base import Images, Source
from deepex.data.source.hdf5 import Hdf5Images, open_hdf5
from deepex.data.source.layout import Layout
from deepex.errors import ConfigError, DataError

MAGIC: Final = b"\x89HDF\r\n\x1a\n"
SUFFIXES: Final = (".h5", ".hdf5", ".he5", ".nxs", ".hdf")
_FILE_BYTES: Final = 64 << 20  # of samples that are read at once
_SAMPLED_BLOCKS: Final = 16
_SEED: Final = 1
_LEAST_BLOCKS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Hdf5Config:
    """Where images and labels are (by default under the usual names); the share held out if there is no validation part.

    `scale`: the values that map to 0 and 1; by default 0 to 255 for bytes, and what the sampled blocks have for others.
    """

    images: str | None = None
    labels: str | None = None
    layout: Layout | None = None
    validation: float = 0.1
    scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ConfigError(f"data_options.validation is {self.validation}; it must be a share, at least 0 and below 1")
        if self.scale and (len(self.scale) != 2 or not self.scale[0] < self.scale[1]):
            raise ConfigError(f"data_options.scale is {list(self.scale)}; it must be [low, high], low below high")


def find_hdf5(path: Path) -> list[Path]:
    """The HDF5 files that `path` is or has; none if it is something else."""
    if path.is_dir():
        if (path / "manifest.json").exists():
            return []
        return sorted(entry for entry in path.iterdir() if entry.name.lower().endswith(SUFFIXES))
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [path] if file.read(len(MAGIC)) == MAGIC or path.name.lower().endswith(SUFFIXES) else []


@final
class Hdf5Dataset:
    """HDF5 files with the face of a packed dataset."""

    def __init__(self, directory: Path, manifest: Manifest, parts: dict[str, "Hdf5Part"]) -> None:
        self.directory, self.manifest, self._parts = directory, manifest, parts

    @classmethod
    def open(cls, path: Path, config: Hdf5Config) -> "Hdf5Dataset":
        """Open the files that `path` is or has, and look at some blocks."""
        source = open_hdf5(find_hdf5(path), images=config.images, labels=config.labels, layout=config.layout)
        parts = _deal(source, config.validation)
        labels = [one.labels for one in (source.train, source.validation) if one is not None and one.labels is not None]
        classes = tuple(map(str, range(1 + max(int(each.max()) for each in labels)))) if labels else ()
        return cls(path, _describe(path, parts, classes, config), parts)

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
    """Samples in the order in which their blocks were dealt; `bounds` cut them into pieces that are read at once."""

    def __init__(self, images: Images, blocks: NDArray[np.int64], rows: int) -> None:
        self._images = images
        self.sample_shape = images.shape
        self.dtype = _stored(images.dtype)
        starts = blocks * rows
        self._starts = starts  # of each block in the source
        self._edges = np.cumsum([0, *np.minimum(rows, images.count - starts)])  # of each block in the dealt order
        self.count = int(self._edges[-1])
        sample_bytes = math.prod(images.shape) * self.dtype.itemsize
        per_file = max(1, _FILE_BYTES // (sample_bytes * rows))
        self.bounds = self._edges[[*range(0, len(blocks), per_file), len(blocks)]]

    def read_file(self, number: int, sink: Sink, *, span: tuple[int, int] | None = None, verify: bool = False) -> None:
        """Read the samples `span` of piece `number`, or all, into what `sink` gives."""
        begin, end = int(self.bounds[number]), int(self.bounds[number + 1])
        sink.take_labels(self._labels(np.arange(begin, end)))
        sample_bytes = math.prod(self.sample_shape) * self.dtype.itemsize
        for low, high in requests(*(span or (0, end - begin)), sample_bytes):
            sink.check()
            at = begin + low
            for view in sink.memory(low, high):
                rows = np.frombuffer(view, self.dtype).reshape(-1, *self.sample_shape)
                self.read_into(at, at + len(rows), rows)
                at += len(rows)
            sink.filled(low, high)

    def read_into(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Write the samples `start` up to `stop` of the dealt order into `out`, block by block."""
        block = int(np.searchsorted(self._edges, start, side="right")) - 1
        at = start
        while at < stop:
            first = int(self._starts[block]) + at - int(self._edges[block])
            count = min(stop, int(self._edges[block + 1])) - at
            self._read(np.arange(first, first + count), out[at - start : at - start + count])
            at, block = at + count, block + 1

    def gather(self, indices: NDArray[Any], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        """Write the samples at `indices` (any order) into given arrays."""
        numbers = self._numbers(np.asarray(indices, np.int64))
        unique, inverse = np.unique(numbers, return_inverse=True)
        values = np.empty((len(unique), *self.sample_shape), self.dtype)
        self._read(unique, values)
        images_out[:] = values[inverse]
        labels_out[:] = self._labels(indices)

    def _read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
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

    def _numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        block = np.searchsorted(self._edges, positions, side="right") - 1
        numbers: NDArray[np.int64] = self._starts[block] + positions - self._edges[block]
        return numbers

    def _labels(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        labels = self._images.labels
        return np.zeros(len(positions), np.int64) if labels is None else labels[self._numbers(positions)]


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which type rows are cached: as they are where a network's input is made from it on the device, else float32."""
    if dtype == np.bool_:
        return np.dtype(np.uint8)
    native = dtype.newbyteorder("=")
    return native if native in (np.uint8, np.float16, np.float32) else np.dtype(np.float32)


def _deal(source: Source, share: float) -> dict[str, Hdf5Part]:
    """The blocks of the train part in an order drawn once; the last share of them is held out if there is no other part."""
    blocks, rows = _permuted(source.train)
    if source.validation is not None:
        return {
            "train": Hdf5Part(source.train, blocks, rows),
            "validation": Hdf5Part(source.validation, *_permuted(source.validation)),
        }
    held = min(max(1, round(share * len(blocks))), len(blocks) - 1) if share else 0
    parts = {"train": Hdf5Part(source.train, blocks[: len(blocks) - held], rows)}
    if held:
        parts["validation"] = Hdf5Part(source.train, blocks[len(blocks) - held :], rows)
    return parts


def _permuted(images: Images) -> tuple[NDArray[np.int64], int]:
    """The numbers of the blocks in the order in which they are dealt, and the rows of a block.

    Whole chunks where they are compressed, and a thousandth of the dataset if that is more: small enough that each shard has many.
    """
    assert isinstance(images, Hdf5Images)
    rows = min(max(images.band, -(-images.count // _LEAST_BLOCKS) // images.band * images.band), images.block)
    return np.random.default_rng(_SEED).permutation(-(-images.count // rows)), rows


def _describe(path: Path, parts: dict[str, Hdf5Part], classes: tuple[str, ...], config: Hdf5Config) -> Manifest:
    train = parts["train"]
    moments = Moments(train.sample_shape[2])
    for start in np.unique(np.linspace(0, len(train.bounds) - 2, _SAMPLED_BLOCKS).astype(int)):
        stop = min(int(train.bounds[start]) + 256, int(train.bounds[start + 1]))
        block = np.empty((stop - int(train.bounds[start]), *train.sample_shape), train.dtype)
        train.read_into(int(train.bounds[start]), stop, block)
        moments.add(block)
    bytes_scale = (0.0, 1.0) if moments.high <= 1 else (0.0, 255.0)
    spread = (moments.low, moments.high if moments.high > moments.low else moments.low + 1)
    low, high = config.scale or (bytes_scale if train.dtype == np.uint8 else spread)
    mean, deviation = moments.scaled(low, high)
    height, width, channels = train.sample_shape
    dtype: Literal["uint8", "float16", "float32"] = str(train.dtype)  # type: ignore[assignment]
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
        source={"kind": "HDF5, read without packing", "moments": "estimated from some blocks"},
    )
