"""Reading a packed dataset: whole ranges in large sequential reads, or any samples by index from memory maps.

>>> train = PackedDataset.open("samples/fashion").part("train")
>>> images, labels = train.read(0, 256)                    # fresh arrays (256, 28, 28, 1) and (256,)
>>> train.gather(np.array([5999, 3, 3]), images[:3], labels[:3])

Files are opened when first touched, checked then, and stay mapped. A part may be read by several threads at once, each
into arrays of its own: nothing is changed but the table of open files, where the worst of a race is to open a file
twice.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds import read_counter
from deepex.data.feeds.read import Sink, Unlike, changed, hand_over, npy_header, read_rows, read_whole
from deepex.data.manifest import Manifest, PackedFile, Part, load
from deepex.data.npy import COMPRESSED, MOST_HEADER_BYTES, byte_view, load_compressed, map_npy, read_header, remember
from deepex.errors import DataError

_BLOCK_BYTES = 16 << 20


@final
class PackedDataset:
    """A packed dataset in a directory; `open` checks its manifest, files are checked when they are first read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._parts = {name: PackedPart(directory, manifest, part) for name, part in manifest.parts.items()}

    @classmethod
    def open(cls, directory: Path | str) -> "PackedDataset":
        """Open the dataset in `directory`."""
        directory = Path(directory)
        return cls(directory, load(directory))

    def part(self, name: str) -> "PackedPart":
        """Give the samples of the part `name`."""
        if name not in self._parts:
            raise DataError(
                f"dataset {self.directory} has no part {name!r}; it has: {', '.join(sorted(self._parts))}. "
                "Use one of these, or pack it again with --validation"
            )
        return self._parts[name]

    def verify(self, rank: int = 0, size: int = 1, progress: Callable[[int], None] | None = None) -> list[str]:
        """Compare the files number `rank`, `rank + size`, … with their SHA-256; return a message for each bad one.

        `progress` is told the bytes of each block that was read.
        """
        mine = list(self._checks())[rank::size]
        messages = (_fault(self.directory / name, digest, check, progress) for name, digest, check in mine)
        return [message for message in messages if message]

    def missing(self, rank: int = 0, size: int = 1) -> list[str]:
        """Look for the files number `rank`, `rank + size`, …; return a message for each that is not there or of another size.

        They are not opened: on a parallel file system that is what would cost.
        """
        found: list[str] = []
        for part in self._parts.values():
            for file in part.packed.files[rank::size]:
                found.extend(part.missing(file))
        return found

    def _checks(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Each file's name, its SHA-256, and what opens it."""
        for part in self._parts.values():
            for file in part.packed.files:
                yield file.images, file.images_sha256, partial(part.open_images, file)
                if file.labels is not None:
                    yield file.labels, str(file.labels_sha256), partial(part.open_labels, file)


@final
class PackedPart:
    """The samples of one part, numbered 0 to `count` - 1 across its files.

    Each is `sample_shape`, (height, width, channels), of `dtype`. Where the dataset has no labels, zeros are given.
    """

    def __init__(self, directory: Path, manifest: Manifest, packed: Part) -> None:
        self.packed = packed
        self.count = packed.count
        self.sample_shape = manifest.sample_shape
        self.dtype = np.dtype(manifest.dtype)
        self._directory = directory
        self._num_classes = len(manifest.classes)
        # File k holds the samples bounds[k] up to bounds[k + 1].
        self.bounds = np.cumsum([0, *(file.count for file in packed.files)])
        self._images: dict[str, NDArray[Any]] = {}
        self._labels: dict[str, NDArray[np.int64]] = {}
        self._offsets: dict[str, int] = {}  # where the values of a file start

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Read the samples `start` up to `stop` as fresh contiguous arrays."""
        self._check_range(start, stop)
        images = np.empty((stop - start, *self.sample_shape), self.dtype)
        labels = np.empty(stop - start, np.int64)
        self.read_into(start, stop, images, labels)
        return images, labels

    def read_into(self, start: int, stop: int, images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        """Write the samples `start` up to `stop` into given arrays, with one sequential read per file."""
        self._check_range(start, stop)
        self._check_arrays(stop - start, images_out, labels_out)
        for file, low, first, last in self._overlaps(start, stop):
            target = slice(low + first - start, low + last - start)
            self._read_images(file, first, images_out[target])
            labels_out[target] = self.open_labels(file)[first:last] if file.labels else 0

    def gather(self, indices: NDArray[np.integer[Any]], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        """Write the samples at `indices` (any order, repeated or not) into given arrays."""
        self._check_arrays(len(indices), images_out, labels_out)
        if len(indices) == 0:
            return
        # In ascending order the samples of one file stand together, and a disk or file system reads forwards.
        order = np.argsort(indices)
        ascending = indices[order]
        if ascending[0] < 0 or ascending[-1] >= self.count:
            raise IndexError(f"indices go from {ascending[0]} to {ascending[-1]}; samples are numbered 0 to {self.count - 1}")
        cuts = np.searchsorted(ascending, self.bounds)
        for k in np.flatnonzero(np.diff(cuts)):
            file, here = self.packed.files[k], slice(cuts[k], cuts[k + 1])
            local = ascending[here] - self.bounds[k]
            if local.size == len(indices):  # one file has them all: no copy in between, and no order to restore
                local = indices - self.bounds[k]
                # `clip` only because numpy buffers the output of `raise`; the bounds were checked above.
                np.take(self._taken(file, local), local, axis=0, out=images_out, mode="clip")
                labels_out[:] = self.open_labels(file)[local] if file.labels else 0
                return
            images_out[order[here]] = self._taken(file, local)[local]
            labels_out[order[here]] = self.open_labels(file)[local] if file.labels else 0

    def read_file(self, number: int, sink: Sink, *, span: tuple[int, int] | None = None, verify: bool = False) -> None:
        """Read file `number` once, in large requests, into what `sink` gives: the samples `span`, or all of them.

        With `verify` the whole file is read and its SHA-256 compared; where it differs, DataError is raised at the end.
        """
        file = self.packed.files[number]
        sink.take_labels(self._read_labels(file, verify=verify) if file.labels else np.zeros(file.count, np.int64))
        path, shape, span = self._directory / file.images, (file.count, *self.sample_shape), span or (0, file.count)
        if path.suffix == COMPRESSED:
            found = self._digest(path) if verify else None
            images = self.open_images(file)
            self._images.pop(file.images, None)  # else it would stay in memory twice
            hand_over(images, (0, file.count) if verify else span, sink)
        else:
            row_bytes = math.prod(self.sample_shape) * self.dtype.itemsize
            try:
                header, found = read_rows(path, row_bytes=row_bytes, count=file.count, span=span, sink=sink, hashing=verify)
            except (Unlike, OSError) as error:
                self.open_images(file)  # finds the reason in most cases
                raise DataError(f"{path} cannot be read: {error or 'its size changed'}; restore it") from error
            if header != npy_header(shape, self.dtype):
                self.open_images(file)  # raises, unless another numpy has only written the header in another way
        if found is not None and found != file.images_sha256:
            raise DataError(_advice(changed(path, found, file.images_sha256)))

    def missing(self, file: PackedFile) -> list[str]:
        """What is wrong with the sizes of one file and its labels, as sentences."""
        promised = [(file.images, file.count * math.prod(self.sample_shape) * self.dtype.itemsize, self.open_images)]
        if file.labels:
            promised.append((file.labels, 8 * file.count, self.open_labels))
        found = []
        for name, num_bytes, check in promised:
            path = self._directory / name
            try:
                header_bytes = path.stat().st_size - num_bytes
                if path.suffix != COMPRESSED and not 0 < header_bytes <= MOST_HEADER_BYTES:
                    check(file)
            except DataError as error:
                found.append(str(error))
            except OSError as error:
                found.append(_unreadable(path, error))
        return found

    def _read_labels(self, file: PackedFile, *, verify: bool) -> NDArray[np.int64]:
        """Read the labels of one file, at once."""
        path, promised = self._directory / str(file.labels), str(file.labels_sha256)
        if path.suffix == COMPRESSED:
            found, labels = self._digest(path) if verify else None, self.open_labels(file)
        else:
            try:
                data, found = read_whole(path, hashing=verify)
            except OSError:
                self.open_labels(file)
                raise
            header = npy_header((file.count,), np.dtype(np.int64))
            whole = data.startswith(header) and len(data) == len(header) + 8 * file.count
            labels = np.frombuffer(data, np.int64, offset=len(header)) if whole else self.open_labels(file)
            self._check_labels(path, labels)
        if found is not None and found != promised:
            raise DataError(_advice(changed(path, found, promised)))
        return labels

    def _digest(self, path: Path) -> str:
        try:
            return str(read_whole(path, hashing=True)[1])
        except OSError as error:
            raise DataError(_unreadable(path, error)) from error

    def open_images(self, file: PackedFile) -> NDArray[Any]:
        """Map the images of one file, after a check that they are what the manifest says."""
        images = self._images.get(file.images)
        if images is None:
            images = self._open(file.images, (file.count, *self.sample_shape), self.dtype)
            remember(self._images, file.images, images)
        return images

    def _taken(self, file: PackedFile, rows: NDArray[Any]) -> NDArray[Any]:
        """Map the images of one file to take some of them, and count these unless they are in memory."""
        images = self.open_images(file)
        if file.images in self._offsets:
            read_counter.read(len(rows) * images[0].nbytes)
        return images

    def open_labels(self, file: PackedFile) -> NDArray[np.int64]:
        """Map the labels of one file, after a check that they are what the manifest says."""
        name = str(file.labels)
        labels = self._labels.get(name)
        if labels is None:
            labels = self._open(name, (file.count,), np.dtype(np.int64))
            read_counter.read(labels.nbytes if name in self._offsets else 0)  # the check reads them all
            self._check_labels(self._directory / name, labels)
            remember(self._labels, name, labels)
        return labels

    def _check_labels(self, path: Path, labels: NDArray[np.int64]) -> None:
        # On a GPU a label that is no class ends the process without a word on the cause.
        if labels.min() < 0 or labels.max() >= self._num_classes:
            raise DataError(
                f"{path} has labels from {labels.min()} to {labels.max()}; they must be from 0 to {self._num_classes - 1}: pack "
                "the dataset again"
            )

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self._directory / name
        if path.suffix == COMPRESSED:
            values = load_compressed(path)
            self._check_header(path, (values.shape, values.dtype, not values.flags.c_contiguous), (shape, dtype))
            return values
        header = read_header(path)
        self._check_header(path, (header.shape, header.dtype, header.fortran_order), (shape, dtype))
        self._offsets[name] = header.offset
        return map_npy(path, header)

    @staticmethod
    def _check_header(path: Path, found: tuple[Any, Any, bool], promised: tuple[Any, Any]) -> None:
        if found != (*promised, False):
            order = "Fortran" if found[2] else "C"
            raise DataError(
                f"{path} holds {found[1]} of shape {found[0]} in {order} order; the manifest says {promised[1]} of "
                f"shape {promised[0]} in C order: restore the file or pack the dataset again"
            )

    def _read_images(self, file: PackedFile, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with the images from number `first` of `file`.

        Plain reads, not the map: one large request is what a parallel file system is built for; a map asks page by
        page.
        """
        images = self.open_images(file)
        if not out.flags.c_contiguous or file.images not in self._offsets:  # a compressed file is in memory already
            out[:] = images[first : first + len(out)]
            return
        path, view = self._directory / file.images, byte_view(out)
        begin = self._offsets[file.images] + first * images[0].nbytes
        done = 0
        read_counter.opened(len(view))
        with path.open("rb", buffering=0) as raw:
            raw.seek(begin)
            while done < len(view):  # Linux reads at most 2 GiB at once
                num_bytes = raw.readinto(view[done:])
                if not num_bytes:
                    raise DataError(
                        f"{path} ends at offset {begin + done}; {len(view) - done} more bytes were expected: it was "
                        "cut while in use, restore it"
                    )
                done += num_bytes

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[PackedFile, int, int, int]]:
        """Find the files with samples of `start` up to `stop`: file, number of its first sample, range within it."""
        for k, file in enumerate(self.packed.files):
            low, high = int(self.bounds[k]), int(self.bounds[k + 1])
            if low < stop and start < high:
                yield file, low, max(start, low) - low, min(stop, high) - low

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"samples {start} up to {stop} were asked for; they are numbered 0 to {self.count - 1}")

    def _check_arrays(self, count: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        shape = (count, *self.sample_shape)
        if images.shape != shape or images.dtype != self.dtype:
            raise ValueError(f"images_out is {images.dtype} of shape {images.shape}; it must be {self.dtype} of shape {shape}")
        if labels.shape != (count,) or labels.dtype != np.int64:
            raise ValueError(f"labels_out is {labels.dtype} of shape {labels.shape}; it must be int64 of shape {(count,)}")


def _fault(path: Path, digest: str, check: Callable[[], object], progress: Callable[[int], None] | None) -> str | None:
    """Say what is wrong with a file, or None."""
    try:
        check()
        found = _sha256(path, progress)
    except DataError as error:
        return str(error)
    except OSError as error:
        return _unreadable(path, error)
    if found != digest:
        return changed(path, found, digest)
    return None


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}; restore it or pack the dataset again"


def _advice(fault: str) -> str:
    return f"{fault}, or train on it as it is with verify=false"


def _sha256(path: Path, progress: Callable[[int], None] | None) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as raw:
        while num_bytes := raw.readinto(buffer):
            digest.update(view[:num_bytes])
            if progress is not None:
                progress(num_bytes)
    return digest.hexdigest()
