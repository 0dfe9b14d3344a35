"""Reading a file once, from its first byte to its last, in one request or in several of 16 MiB and more, and hashing it on the way.

    sink = Rows([Target(0, 6000, images, labels)], row_bytes=784)
    header, digest = read_rows(path, row_bytes=784, count=6000, span=(0, 6000), sink=sink, hashing=True)

Plain reads, not a memory map: one large request is what a parallel file system is built for; a map asks page by page. The bytes go
straight to where they are wanted, in one request even where that is several places (preadv).
"""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.feeds import read_counter
from deepex.data.npy import MOST_HEADER_BYTES, byte_view
from deepex.errors import DataError

REQUEST_BYTES: Final = 16 << 20
_MOST_VIEWS: Final = 512  # of one request; Linux takes 1024


class Stopped(Exception):  # noqa: N818 - no error: whoever reads was told to stop
    """Reading was broken off on request."""


class Unlike(Exception):  # noqa: N818 - whoever knows the name of the file makes an error of it
    """A file is not of the size that its dataset promises."""


class Sink(ABC):
    """Where the samples of a file go. Once `stopped` says so, the reading is broken off before the next request."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped

    @abstractmethod
    def take_labels(self, labels: NDArray[np.int64]) -> None:
        """Take the labels of the whole file; called once, before any image."""

    @abstractmethod
    def memory(self, first: int, last: int) -> list[memoryview]:
        """Memory for the bytes of the images `first` up to `last`, in order."""

    def filled(self, first: int, last: int) -> None:  # noqa: B027 - most need not know
        """Be told that the memory given last is filled."""

    def check(self) -> None:
        """Break off if told to."""
        if self._stopped():
            raise Stopped


class ReadInto(NamedTuple):
    """Arrays for the samples `first` up to `last` of a file."""

    first: int
    last: int
    images: NDArray[Any]
    labels: NDArray[np.int64]


@final
class Rows(Sink):
    """Puts the samples of a file into the arrays of `targets`, and drops what lies between these."""

    def __init__(self, targets: Sequence[ReadInto], row_bytes: int, stopped: Callable[[], bool] = lambda: False) -> None:
        super().__init__(stopped)
        self._targets = sorted(targets, key=lambda target: target.first)
        self._row_bytes = row_bytes
        self._unwanted = np.empty(0, np.uint8)

    @override
    def take_labels(self, labels: NDArray[np.int64]) -> None:
        for target in self._targets:
            target.labels[:] = labels[target.first : target.last]

    @override
    def memory(self, first: int, last: int) -> list[memoryview]:
        views, at = [], first
        for target in self._targets:
            low, high = max(first, target.first), min(last, target.last)
            if low < high:
                views.append(self._drop(at - first, low - first))
                views.append(byte_view(target.images[low - target.first : high - target.first]))
                at = high
        views.append(self._drop(at - first, last - first))
        return [view for view in views if len(view)]

    def _drop(self, first: int, last: int) -> memoryview:
        """Memory for rows of a request that nobody wants: each its own, because what is read may still be hashed."""
        if first < last and last * self._row_bytes > len(self._unwanted):
            self._unwanted = np.empty(last * self._row_bytes, np.uint8)
        return self._unwanted[first * self._row_bytes : last * self._row_bytes].data


def read_rows(
    path: Path, *, row_bytes: int, count: int, span: tuple[int, int], sink: Sink, hashing: bool
) -> tuple[bytes, str | None]:
    """Read the rows `span` of a file of `count` rows after a header; all of them if its SHA-256 is wanted.

    Gives the header and the SHA-256. Raises Unlike if the file cannot be one of these.
    """
    first, last = (0, count) if hashing else span
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as raw:
        read_counter.opened()
        file = raw.fileno()
        offset = os.fstat(file).st_size - count * row_bytes
        if not 0 < offset <= MOST_HEADER_BYTES:
            raise Unlike
        header = bytearray(offset)
        if first > 0:
            _fill(file, [memoryview(header)], 0, path)
        for low, high in requests(first, last, row_bytes):
            sink.check()
            views = sink.memory(low, high)
            if low == 0:
                views.insert(0, memoryview(header))
            _fill(file, views, offset + low * row_bytes if low else 0, path)
            if hashing:
                for view in views:
                    digest.update(view)
            sink.filled(low, high)
    return bytes(header), digest.hexdigest() if hashing else None


def read_whole(path: Path, *, hashing: bool) -> tuple[bytes, str | None]:
    """Read a small file at once. Gives its bytes and its SHA-256."""
    with path.open("rb", buffering=0) as raw:
        data = raw.readall()
    read_counter.opened(len(data))
    return data, hashlib.sha256(data).hexdigest() if hashing else None


def requests(first: int, last: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into near-equal requests of at least 16 MiB, or into one; none has as much as 32 MiB and a row."""
    least = max(1, -(-REQUEST_BYTES // row_bytes))
    number = max(1, (last - first) // least)
    edges = [first + (last - first) * k // number for k in range(number + 1)]
    yield from pairwise(edges)


def most_rows(count: int, row_bytes: int) -> int:
    """No request for `count` rows, or for fewer, has more than these: one for fewer rows may be the larger one."""
    return min(count, 2 * max(1, -(-REQUEST_BYTES // row_bytes)) - 1)


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of a `.npy` file of such values, as this numpy writes it."""
    buffer = io.BytesIO()
    table = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(buffer, table)
    return buffer.getvalue()


def hand_over(values: NDArray[Any], span: tuple[int, int], sink: Sink) -> None:
    """Give a sink the rows `span` of an array that is in memory already, as if they were read."""
    for low, high in requests(*span, values[0].nbytes):
        sink.check()
        at, source = 0, byte_view(values[low:high])
        for view in sink.memory(low, high):
            view[:] = source[at : at + len(view)]
            at += len(view)
        sink.filled(low, high)


def changed(path: Path, found: str, promised: str) -> str:
    """What to say of a file whose SHA-256 is another one."""
    return (
        f"{path} was changed after packing: its SHA-256 is {found}, the manifest says {promised}; restore it or pack the dataset "
        "again"
    )


def _fill(file: int, views: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fill all views with the bytes from `offset` on; a system may give less than was asked for (Linux at most 2 GiB)."""
    left = list(views)
    while left:
        num_bytes = os.preadv(file, left[:_MOST_VIEWS], offset)
        if num_bytes == 0:
            missing = sum(map(len, left))
            raise DataError(
                f"{path} ends at offset {offset}; {missing} more bytes were expected: it was cut while in use, restore it"
            )
        read_counter.read(num_bytes)
        offset += num_bytes
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if num_bytes:
            left[0] = left[0][num_bytes:]
