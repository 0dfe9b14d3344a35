"""HDF5 files as samples: one or many, any dataset paths, contiguous or in chunks, plain or compressed.

>>> source = open_hdf5([Path("run-1.h5"), Path("run-2.h5")], images="entry/data/frames", labels=None, layout=None)
>>> out = np.empty((1000, *source.train.shape), source.train.dtype)
>>> source.train.read_rows(0, 1000, out)                  # straight from the library into `out`
[]

Datasets that cannot be read as they were written are refused when they are opened: see `hdf5_dataset.py`.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.feeds import read_counter
from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.hdf5_dataset import ERRORS, Stored, find, inspect, opened, reason
from deepex.data.source.layout import AxisOrder, checked_labels, to_nhwc
from deepex.errors import DataError

_MOST_BYTES: Final = 32 << 20  # of one read
_LEAST_BYTES: Final = 1 << 20  # of a block
_GAP_BYTES: Final = 64 << 10  # unwanted bytes that are cheaper read along than jumped over: a call costs about 10 µs
_MOST_OPEN: Final = 16
_TURN: Final = threading.Lock()  # train and validation share open files, and each has a reader; the library is serial anyway


@final
class Hdf5Images(Images):
    """The rows of one dataset, concatenated over files; each is opened when it is first read, once per process."""

    def __init__(
        self, tables: Sequence[Stored], labels: NDArray[np.int64] | None, labels_key: str | None, layout: AxisOrder | None
    ):
        first = tables[0]
        self._tables, self._stored_shape = tuple(tables), first.shape[1:]
        self.starts = np.cumsum([0, *(table.shape[0] for table in tables)])
        self.count, self.dtype, self.labels = int(self.starts[-1]), first.dtype, labels
        whole = (self.count, *self._stored_shape)
        view, note = to_nhwc(np.broadcast_to(np.zeros((), self.dtype), whole), first.path, layout)  # of no memory
        self._channels_first = note.startswith("NCHW")
        self.shape = view.shape[1:]
        self._row_bytes = first.row_bytes
        # Of a large chunk that is not compressed, any part can be read on its own.
        band = max(table.band if table.filtered or table.band * self._row_bytes <= _MOST_BYTES else 1 for table in tables)
        self.band = band  # rows that can only be read together
        self.block = -(-max(1, _LEAST_BYTES // self._row_bytes) // band) * band
        self.busy = any(table.filtered for table in tables)
        files = [table.path.name for table in tables]
        self.description = {"format": "HDF5", "files": files, "images": first.key, "labels": labels_key, "layout": note}
        self._forget()

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        bad: list[Bad] = []
        for file, (begin, end) in enumerate(pairwise(np.searchsorted(numbers, self.starts).tolist())):
            rows = numbers[begin:end] - self.starts[file]
            for first, last in pairwise(self._cuts(file, rows)):
                found = self._read_near(file, rows[first:last], out[begin + first : begin + last])
                bad += [Bad(begin + first + place, self.name(int(numbers[begin + first + place])), why) for place, why in found]
        return bad

    def read_rows(self, start: int, stop: int, out: NDArray[Any]) -> list[Bad]:
        """Read the samples from `start` up to `stop`, with no copy in between where type and layout are those of the file."""
        return self.read(np.arange(start, stop), out)

    @override
    def name(self, number: int) -> str:
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        table = self._tables[file]
        return f"{table.path} {table.key}[{number - self.starts[file]}]"

    def close(self) -> None:
        """Close the files of this process; reading opens them again."""
        for file, _ in self._open.values() if self._process == os.getpid() else ():
            file.close()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_process": None}

    def _forget(self) -> None:
        self._open: dict[int, tuple[Any, Any]] = {}
        self._process: int | None = None

    def _cuts(self, file: int, rows: NDArray[np.int64]) -> list[int]:
        """Where in `rows` a new read begins, with both ends: at long gaps, and so that no read is long or halves a chunk."""
        if not len(rows):
            return []
        table = self._tables[file]
        most = max(1, _MOST_BYTES // self._row_bytes)
        most = most // table.band * table.band or most
        far = np.diff(rows // table.band) > 1 if table.filtered else np.diff(rows) * self._row_bytes > _GAP_BYTES
        return [0, *(np.flatnonzero(far | (np.diff(rows // most) > 0)) + 1).tolist(), len(rows)]

    def _read_near(self, file: int, rows: NDArray[np.int64], out: NDArray[Any]) -> list[tuple[int, str]]:
        """Read rows that lie near each other in one go; after an error by halves, down to the chunk that has it."""
        try:
            self._transfer(file, int(rows[0]), int(rows[-1]) + 1, rows, out)
        except ERRORS as error:
            band = self._tables[file].band
            if rows[0] // band == rows[-1] // band:
                why = f"it cannot be read: {reason(error)}; restore the file"
                return [(place, why) for place in range(len(rows))]
            border = max(rows[len(rows) // 2] // band, rows[0] // band + 1) * band
            half = int(np.searchsorted(rows, border))
            later = self._read_near(file, rows[half:], out[half:])
            return self._read_near(file, rows[:half], out[:half]) + [(half + place, why) for place, why in later]
        return []

    def _transfer(self, file: int, start: int, stop: int, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        shape = (stop - start, *self._stored_shape)
        as_stored = not self._channels_first or self.shape[2] == 1
        if stop - start == len(rows) and as_stored and out.flags.c_contiguous and out.dtype == self.dtype:
            self._select(file, start, out.reshape(shape))
            return
        held = np.empty(shape, self.dtype)
        self._select(file, start, held)
        ordered = held.transpose(0, 2, 3, 1) if self._channels_first else held.reshape(len(held), *self.shape)
        out[:] = ordered if len(rows) == len(held) else ordered[rows - start]

    def _select(self, file: int, start: int, into: NDArray[Any]) -> None:
        """Fill `into` from row `start` on. The calls that h5py's own slicing ends in: a tenth of its time for one row."""
        import h5py

        with _TURN:
            identity = self._dataset(file)
            space = identity.get_space()
            space.select_hyperslab((start, *(0 for _ in self._stored_shape)), into.shape)
            identity.read(h5py.h5s.create_simple(into.shape), space, into, h5py.h5t.py_create(into.dtype))
        read_counter.read(into.nbytes)

    def _dataset(self, file: int) -> Any:
        if self._process != os.getpid():  # a fork inherits handles, and may not use them
            self._forget()
            self._process = os.getpid()
        if file not in self._open:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))[0].close()
            self._open[file] = self._reopened(self._tables[file])
        return self._open[file][1]

    @staticmethod
    def _reopened(table: Stored) -> tuple[Any, Any]:
        handle = opened(table.path, cache_bytes=table.cache_bytes)
        with ExitStack() as unless_fine:
            unless_fine.callback(handle.close)
            now = inspect(handle, table.path, table.key)
            if now != table:
                raise DataError(f"{table.path} has changed: {table.key} is now {now.dtype} of shape {now.shape}; start again")
            unless_fine.pop_all()
        return handle, handle[table.key].id


def open_hdf5(
    paths: Sequence[Path], *, images: str | None, labels: str | None, layout: AxisOrder | None, held_labels: str | None = None
) -> Source:
    """Open the files in the order of their names.

    `images`, `labels` and, for a validation part in these files, `held_labels` are paths of datasets, found by usual names if None.
    """
    ordered = sorted(paths, key=lambda path: (path.name, path))
    if not ordered:
        raise DataError("no HDF5 file was given; name at least one")
    with opened(ordered[0]) as file:
        names = find(file, ordered[0], images=images, labels=labels, held_labels=held_labels)
    train = _part(ordered, names.images, names.labels, layout)
    held = None if names.held_images is None else _part(ordered, names.held_images, names.held_labels, layout)
    return Source(train=train, validation=held)


def _part(paths: Sequence[Path], images: str, labels: str | None, layout: AxisOrder | None) -> Hdf5Images:
    tables: list[Stored] = []
    classes: list[NDArray[np.int64]] = []
    for path in paths:
        with opened(path) as file:
            table = inspect(file, path, images)
            tables.append(table)
            if (table.shape[1:], table.dtype) != (tables[0].shape[1:], tables[0].dtype):
                raise DataError(
                    f"{path} has images of shape {table.shape[1:]} and type {table.dtype}, {tables[0].path} of shape "
                    f"{tables[0].shape[1:]} and type {tables[0].dtype}; all files must agree: convert it, or leave it out"
                )
            if labels is not None:
                classes.append(_labels(file, path, labels, table))
    return Hdf5Images(tables, np.concatenate(classes) if labels is not None else None, labels, layout)


def _labels(file: Any, path: Path, key: str, images: Stored) -> NDArray[np.int64]:
    """Read the labels of one file whole, once it is known that they are as many as its images."""
    table = inspect(file, path, key)
    where = Path(f"{path} {key}")
    if table.shape[0] != images.shape[0]:
        raise DataError(
            f"{path} has {images.shape[0]} images in {images.key}, but {table.shape[0]} labels in {key}; there must be one label "
            "per image: name the datasets that belong together with --images and --labels"
        )
    if len(table.shape) > 2 or table.shape[1:] not in ((), (1,)):
        raise DataError(f"{where} has labels of shape {table.shape}; they must be (n,), one class number per image: convert them")
    try:
        values = file[key][()]
        read_counter.read(values.nbytes)
    except ERRORS as error:
        raise DataError(f"the labels {where} cannot be read: {reason(error)}; restore the file") from error
    if values.dtype.kind == "u" and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where} has the label {values.max()}; labels are class numbers from 0: renumber them")
    return checked_labels(values, where)
