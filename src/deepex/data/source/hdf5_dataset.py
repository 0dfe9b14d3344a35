"""The datasets of an HDF5 file: which are the images and labels, and whether they can be read as they were written.

>>> with opened(Path("mnist.h5")) as file:
...     names = find(file, Path("mnist.h5"), images=None, labels=None)
...     table = inspect(file, Path("mnist.h5"), names.images)              # DataError if it cannot be used
>>> names.images, names.held_images, table.shape, table.dtype
('x_train', 'x_test', (60000, 28, 28), dtype('uint8'))

The HDF5 library answers what it does not have (a chunk that was never written, the missing source of a virtual dataset) with
zeros. Such datasets are refused.
"""

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from deepex.data.feeds import read_counter
from deepex.data.source.layout import listed
from deepex.data.source.names import LABELS, ArrayNames, usual, with_labels
from deepex.errors import DataError

# All that h5py was seen to raise for damaged files: of these SystemError is for names that are not UTF-8.
ERRORS: Final = (OSError, RuntimeError, KeyError, ValueError, TypeError, SystemError)

_MOST_BAND_BYTES: Final = 1 << 30
_SMALL_CACHE_BYTES: Final = 1 << 20
_MOST_LISTED: Final = 1000
_NO_LOCKS: Final = ("errno = 37", "errno = 38", "errno = 95")  # ENOLCK, ENOSYS, EOPNOTSUPP: file systems without locks


class Stored(NamedTuple):
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


def reason(error: BaseException) -> str:
    """The text of an error; that of a KeyError would be quoted."""
    return (str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)) or type(error).__name__


def opened(path: Path, cache_bytes: int = _SMALL_CACHE_BYTES) -> Any:
    """Open a file to read; without a lock only where the file system has none."""
    import h5py

    read_counter.opened()
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
    except ERRORS as error:
        raise DataError(f"{path} cannot be read as HDF5: {reason(error)}; restore it, or write it again") from error


def find(file: Any, path: Path, *, images: str | None, labels: str | None, held_labels: str | None = None) -> ArrayNames:
    """Take the datasets that were named, else those under names that people use, else the only one that can be images."""
    try:
        names = ArrayNames(images) if images is not None else usual(lambda key: _has(file, key)) or _only(file, path)
    except ERRORS as error:
        raise DataError(f"the contents of {path} cannot be listed: {reason(error)}; restore it, or write it again") from error
    return with_labels(names, path, labels, held_labels)


def _has(file: Any, key: str) -> bool:
    import h5py

    return key in file and file.get(key, getclass=True) is h5py.Dataset


def _only(file: Any, path: Path) -> ArrayNames:
    """The one dataset that can be images, with the labels beside it that are as many."""
    shapes = _contents(file)
    fitting = [key for key, shape in shapes.items() if len(shape) in (3, 4)]
    if len(fitting) != 1:
        what = "no dataset" if not fitting else f"{len(fitting)} datasets"
        raise DataError(
            f"{path} has {what} of 3 or 4 dimensions, so it is not clear which are the images; it has "
            f"{listed([f'{key} {shape}' for key, shape in shapes.items()], 16)}: name one with --images"
        )
    images = fitting[0]
    beside = [images[: images.rfind("/") + 1] + name for name in LABELS]
    as_many = (shapes[images][0],)
    return ArrayNames(images, next((key for key in beside if shapes.get(key) in (as_many, (*as_many, 1))), None))


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


def inspect(file: Any, path: Path, key: str) -> Stored:
    """Look up a dataset and refuse what cannot be read, or would be read as something else than was written."""
    try:
        dataset = _looked_up(file, path, key)
        complaint = _complaint(file, path, dataset)
        if complaint is None:
            return _stored(dataset, path, key)
    except ERRORS as error:
        raise DataError(f"{path} has a damaged dataset {key}: {reason(error)}; restore it, or write it again") from error
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
        raise DataError(f"{path} has no dataset {key} ({reason(error)}); it has {present}: name one of these") from error
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


def _stored(dataset: Any, path: Path, key: str) -> Stored:
    # As plain numbers: h5py hangs the names of an enumeration on the type.
    dtype = np.dtype(dataset.dtype.str).newbyteorder("=")
    band = min(dataset.chunks[0], dataset.shape[0]) if dataset.chunks else 1
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    return Stored(path, key, dataset.shape, dtype, band, filtered)
