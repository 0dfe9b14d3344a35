"""HDF5 files as samples: one or many, any dataset paths, contiguous or in chunks, plain or compressed.

>>> source = open_hdf5([Path("run-1.h5"), Path("run-2.h5")], images="entry/data/frames", labels=None, layout=None)
>>> out = np.empty((1000, *source.train.shape), source.train.dtype)
>>> source.train.read_rows(0, 1000, out)                  # straight from the library into `out`
[]

The HDF5 library answers what it does not have (a chunk that was never written, the missing source of a virtual dataset) with
zeros. Such datasets are refused when they are opened.
"""

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.layout import Layout, checked_labels, listed, to_nhwc
from deepex.errors import DataError

_MOST_BYTES: Final = 32 << 20  # of one read
_LEAST_BYTES: Final = 1 << 20  # of a block
_GAP_BYTES: Final = 64 << 10  # unwanted bytes that are cheaper read along than jumped over: a call costs about 10 µs
_MOST_OPEN: Final = 16
# All that h5py was seen to raise for damaged files: of these SystemError is for names that are not UTF-8.
_ERRORS: Final = (OSError, RuntimeError, KeyError, ValueError, TypeError, SystemError)

_MOST_BAND_BYTES: Final = 1 << 30
_SMALL_CACHE_BYTES: Final = 1 << 20
_MOST_LISTED: Final = 1000
_NO_LOCKS: Final = ("errno = 37", "errno = 38", "errno = 95")  # ENOLCK, ENOSYS, EOPNOTSUPP: file systems without locks
_PAIRS: Final = (
    ("x_{}", "y_{}"),
    ("{}/images", "{}/labels"),
    ("{}/data", "{}/labels"),
    ("{}/x", "{}/y"),
    ("{}_images", "{}_labels"),
)
_HELD_OUT: Final = ("validation", "val", "valid", "test")
_SINGLE: Final = (("images", "labels"), ("data", "labels"), ("data", "label"), ("x", "y"), ("X", "y"))


class _Names(NamedTuple):
    """Paths of datasets: train and validation."""

    images: str
    labels: str | None = None
    held_images: str | None = None
    held_labels: str | None = None


class _Stored(NamedTuple):
    """A dataset that can be read. `band`: rows that lie in the same chunks; `dtype` in this machine's byte order."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    band: int
    filtered: bool

    @property
    def row_bytes(self) -> int:
        """One sample, unpacked."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """0 for plain chunks: they go straight to their destination. A band of compressed ones: the next read may want the rest."""
        return max(_SMALL_CACHE_BYTES, self.band * self.row_bytes) if self.filtered else 0


@final
class Hdf5Images(Images):
    """The rows of one dataset, concatenated over files; each is opened when it is first read, once per process."""

    def __init__(self, tables: Sequence[_Stored], labels: NDArray[np.int64] | None, labels_key: str | None, layout: Layout | None):
        first = tables[0]
        self._tables, self._stored_shape = tuple(tables), first.shape[1:]
        self._starts = np.cumsum([0, *(table.shape[0] for table in tables)])
        self.count, self.dtype, self.labels = int(self._starts[-1]), first.dtype, labels
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

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:  # noqa: D102 - see the base
        bad: list[Bad] = []
        for file, (begin, end) in enumerate(pairwise(np.searchsorted(numbers, self._starts).tolist())):
            rows = numbers[begin:end] - self._starts[file]
            for first, last in pairwise(self._cuts(file, rows)):
                found = self._read_near(file, rows[first:last], out[begin + first : begin + last])
                bad += [Bad(begin + first + place, self.name(int(numbers[begin + first + place])), why) for place, why in found]
        return bad

    def read_rows(self, start: int, stop: int, out: NDArray[Any]) -> list[Bad]:
        """Read the samples from `start` up to `stop`, with no copy in between where type and layout are those of the file."""
        return self.read(np.arange(start, stop), out)

    def name(self, number: int) -> str:  # noqa: D102
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        table = self._tables[file]
        return f"{table.path} {table.key}[{number - self._starts[file]}]"

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
        except _ERRORS as error:
            band = self._tables[file].band
            if rows[0] // band == rows[-1] // band:
                why = f"it cannot be read: {_reason(error)}; restore the file"
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

        identity = self._dataset(file)
        space = identity.get_space()
        space.select_hyperslab((start, *(0 for _ in self._stored_shape)), into.shape)
        identity.read(h5py.h5s.create_simple(into.shape), space, into, h5py.h5t.py_create(into.dtype))

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
    def _reopened(table: _Stored) -> tuple[Any, Any]:
        handle = _opened(table.path, cache_bytes=table.cache_bytes)
        now = _inspect(handle, table.path, table.key)
        if now != table:
            handle.close()
            raise DataError(f"{table.path} has changed: {table.key} is now {now.dtype} of shape {now.shape}; start again")
        return handle, handle[table.key].id


def open_hdf5(paths: Sequence[Path], *, images: str | None, labels: str | None, layout: Layout | None) -> Source:
    """Open the files in the order of their names; `images` and `labels` are paths of datasets, found by usual names if None."""
    ordered = sorted(paths, key=lambda path: (path.name, path))
    if not ordered:
        raise DataError("no HDF5 file was given; name at least one")
    with _opened(ordered[0]) as file:
        names = _find(file, ordered[0], images, labels)
    train = _part(ordered, names.images, names.labels, layout)
    held = None if names.held_images is None else _part(ordered, names.held_images, names.held_labels, layout)
    return Source(train=train, validation=held)


def _part(paths: Sequence[Path], images: str, labels: str | None, layout: Layout | None) -> Hdf5Images:
    tables: list[_Stored] = []
    classes: list[NDArray[np.int64]] = []
    for path in paths:
        with _opened(path) as file:
            table = _inspect(file, path, images)
            tables.append(table)
            if (table.shape[1:], table.dtype) != (tables[0].shape[1:], tables[0].dtype):
                raise DataError(
                    f"{path} has images of shape {table.shape[1:]} and type {table.dtype}, {tables[0].path} of shape "
                    f"{tables[0].shape[1:]} and type {tables[0].dtype}; all files must agree: convert it, or leave it out"
                )
            if labels is not None:
                classes.append(_labels(file, path, labels, table))
    return Hdf5Images(tables, np.concatenate(classes) if labels is not None else None, labels, layout)


def _labels(file: Any, path: Path, key: str, images: _Stored) -> NDArray[np.int64]:
    """Read the labels of one file whole, once it is known that they are as many as its images."""
    table = _inspect(file, path, key)
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
    except _ERRORS as error:
        raise DataError(f"the labels {where} cannot be read: {_reason(error)}; restore the file") from error
    if values.dtype.kind == "u" and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where} has the label {values.max()}; labels are class numbers from 0: renumber them")
    return checked_labels(values, where)


def _reason(error: BaseException) -> str:
    """The text of an error; that of a KeyError would be quoted."""
    return (str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)) or type(error).__name__


def _opened(path: Path, cache_bytes: int = _SMALL_CACHE_BYTES) -> Any:
    """Open a file to read; without a lock only where the file system has none."""
    import h5py

    try:
        try:
            return h5py.File(path, "r", rdcc_nbytes=cache_bytes)
        except OSError as error:
            if not any(code in str(error) for code in _NO_LOCKS):
                raise
            return h5py.File(path, "r", rdcc_nbytes=cache_bytes, locking=False)
    except FileNotFoundError:
        raise DataError(f"file {path} is missing; correct the name or put it there") from None
    except BlockingIOError as error:
        raise DataError(f"{path} is being written by another program; wait until that has closed it") from error
    except _ERRORS as error:
        raise DataError(f"{path} cannot be read as HDF5: {_reason(error)}; restore it, or write it again") from error


def _find(file: Any, path: Path, images: str | None, labels: str | None) -> _Names:
    """Take the datasets that were named, else those under names that people use, else the only one that can be images."""
    try:
        names = _Names(images, labels) if images is not None else _usual(file) or _Names(_only(file, path))
    except _ERRORS as error:
        raise DataError(f"the contents of {path} cannot be listed: {_reason(error)}; restore it, or write it again") from error
    return names if labels is None else names._replace(labels=labels)


def _usual(file: Any) -> _Names | None:
    for pair in _PAIRS:
        images, labels = (name.format("train") for name in pair)
        if _has(file, images):
            held = [part for part in _HELD_OUT if _has(file, pair[0].format(part))]
            held_pair = tuple(name.format(held[0]) for name in pair) if held else (None, None)
            return _Names(*(name if name and _has(file, name) else None for name in (images, labels, *held_pair)))  # type: ignore[arg-type]
    present = [pair for pair in _SINGLE if _has(file, pair[0])]
    labelled = [pair for pair in present if _has(file, pair[1])]
    return _Names(*labelled[0]) if labelled else _Names(present[0][0]) if present else None


def _has(file: Any, key: str) -> bool:
    import h5py

    return key in file and file.get(key, getclass=True) is h5py.Dataset


def _only(file: Any, path: Path) -> str:
    shapes = _contents(file)
    fitting = [key for key, shape in shapes.items() if len(shape) in (3, 4)]
    if len(fitting) != 1:
        what = "no dataset" if not fitting else f"{len(fitting)} datasets"
        raise DataError(
            f"{path} has {what} of 3 or 4 dimensions, so it is not clear which are the images; it has "
            f"{listed([f'{key} {shape}' for key, shape in shapes.items()], 16)}: name one with --images"
        )
    return fitting[0]


def _contents(file: Any) -> dict[str, tuple[int, ...] | str]:
    """The shapes of all datasets by their paths; links to other files are listed too, since images may hide there."""
    import h5py

    found: dict[str, tuple[int, ...] | str] = {}

    def note(key: str, thing: Any) -> bool | None:
        if isinstance(thing, h5py.Dataset):
            found[key] = thing.shape or ()
        return len(found) >= _MOST_LISTED or None

    def note_link(key: str, link: Any) -> bool | None:
        if isinstance(link, h5py.ExternalLink):
            found[key] = f"-> {link.filename}"
        return len(found) >= 2 * _MOST_LISTED or None

    file.visititems(note)
    file.visititems_links(note_link)
    return found


def _inspect(file: Any, path: Path, key: str) -> _Stored:
    """Look up a dataset and refuse what cannot be read, or would be read as something else than was written."""
    try:
        dataset = _looked_up(file, path, key)
        complaint = _complaint(file, path, dataset)
        if complaint is None:
            return _stored(dataset, path, key)
    except _ERRORS as error:
        raise DataError(f"{path} has a damaged dataset {key}: {_reason(error)}; restore it, or write it again") from error
    raise DataError(f"{path} has a dataset {key} that {complaint}")


def _looked_up(file: Any, path: Path, key: str) -> Any:
    import h5py

    try:
        thing = file[key]
    except KeyError as error:
        link = file.get(key, getlink=True) if key.strip("/") in _contents(file) else None
        if isinstance(link, h5py.ExternalLink):
            raise DataError(f"{path} has only a link to {link.filename} for {key}; give that file itself") from error
        present = listed([f"{name} {shape}" for name, shape in _contents(file).items()], 16)
        raise DataError(f"{path} has no dataset {key} ({_reason(error)}); it has {present}: name one of these") from error
    if not isinstance(thing, h5py.Dataset):
        inside = [f"{key}/{name} {shape}" for name, shape in _contents(thing).items()] if isinstance(thing, h5py.Group) else []
        raise DataError(f"{path} has a {type(thing).__name__.lower()} {key}, not a dataset; in it are {listed(inside, 16)}")
    return thing


def _complaint(file: Any, path: Path, dataset: Any) -> str | None:
    """Why a dataset cannot be used, or None."""
    dtype, shape = dataset.dtype, dataset.shape
    if dtype.kind not in "buif" or dtype.itemsize > 8:
        return f"holds {_kind(dtype)}; images and labels are integers or real numbers: convert them"
    if shape is None or shape == () or 0 in shape:
        return f"has no samples (shape {shape}); give one with at least one"
    if dataset.file.filename != file.filename:
        return f"lies in another file, {dataset.file.filename}; give that file itself"
    if dataset.is_virtual or dataset.external:
        return "is only a view of other files, and reads as zeros where one is missing; copy it into one file with h5repack or h5py"
    return _storage_complaint(path, dataset) or _filter_complaint(dataset)


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.names:
        return f"compound values ({', '.join(dtype.names)})"
    return "text or references" if dtype.kind in "OSU" else f"values of type {dtype}"


def _storage_complaint(path: Path, dataset: Any) -> str | None:
    shape, chunks = dataset.shape, dataset.chunks
    if chunks is None:
        needed, found = math.prod(shape) * dataset.dtype.itemsize, dataset.id.get_storage_size()
        if found < needed or path.stat().st_size < needed:
            return f"has shape {shape}, {needed} bytes, of which only {min(found, path.stat().st_size)} are there; write it whole"
        return None
    needed = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    found = dataset.id.get_num_chunks()
    if found < needed:
        return f"has shape {shape}, but only {found} of its {needed} chunks were ever written; write it whole, or cut it to size"
    return None


def _filter_complaint(dataset: Any) -> str | None:
    import h5py

    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(number) for number in range(settings.get_nfilters())]
    for code, _, _, name in filters:
        if not h5py.h5z.filter_avail(code):
            return (
                f"is compressed with filter {code} ({name.decode(errors='replace') or 'no name'}), which this HDF5 library "
                "has not; rewrite the file where it was made: h5repack -f GZIP=4 OLD NEW"
            )
    if filters and not _is_safe(dataset, filters):
        return "is damaged: its compression does not fit its chunks; restore the file"
    if filters and (size := dataset.chunks[0] * math.prod(dataset.shape[1:]) * dataset.dtype.itemsize) > _MOST_BAND_BYTES:
        smaller = "x".join(map(str, (1, *dataset.shape[1:])))
        return (
            f"has compressed chunks of shape {dataset.chunks}, so that {size} bytes are unpacked to read one sample; the limit is "
            f"{_MOST_BAND_BYTES}: rewrite it with smaller chunks, h5repack -l CHUNK={smaller} OLD NEW"
        )
    return None


def _is_safe(dataset: Any, filters: list[Any]) -> bool:
    """Whether the library will survive the chunks: to 2.0 at least, it trusts two filters' sizes (HDFGroup/hdf5 issue 6488)."""
    import h5py

    trailer = {h5py.h5z.FILTER_FLETCHER32: 4, h5py.h5z.FILTER_SCALEOFFSET: 21}
    least = max(trailer.get(code, 0) for code, *_ in filters)
    short: list[Any] = []
    if least:
        dataset.id.chunk_iter(lambda chunk: short.append(chunk) if chunk.size < least else None)
    counted = [values for code, _, values, _ in filters if code in (h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET)]
    return not short and all(len(values) > 4 and values[2] == math.prod(dataset.chunks) for values in counted)


def _stored(dataset: Any, path: Path, key: str) -> _Stored:
    # As plain numbers: h5py hangs the names of an enumeration on the type.
    dtype = np.dtype(dataset.dtype.str).newbyteorder("=")
    band = min(dataset.chunks[0], dataset.shape[0]) if dataset.chunks else 1
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    return _Stored(path, key, dataset.shape, dtype, band, filtered)
