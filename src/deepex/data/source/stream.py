"""Arrays in compressed files that are too large for memory: read through once, in order, a block at a time.

    images = StreamedImages(lambda: gzip.open(path), offset=16, shape=(60000, 28, 28), dtype=np.dtype("u1"), …)

Used for `.npz` archives and gzipped IDX files beyond `MOST_BYTES`; smaller ones are simply loaded.
"""

import gzip
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.source.base import Bad, Images
from deepex.data.source.layout import AxisOrder, to_nhwc
from deepex.errors import DataError

MOST_BYTES: Final = 256 << 20  # of an array that is loaded into memory
_BLOCK_BYTES: Final = 16 << 20


@final
class StreamedImages(Images):
    """The rows of an array whose values begin at `offset` of the stream that `open_stream` gives. Going back is starting anew."""

    portable = False

    def __init__(
        self,
        open_stream: Callable[[], IO[bytes]],
        *,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        labels: NDArray[np.int64] | None,
        path: Path,
        files: list[str],
        layout: AxisOrder | None,
    ) -> None:
        view, note = to_nhwc(np.broadcast_to(np.zeros((), dtype), shape), path, layout)  # of no memory
        self._open_stream, self._offset, self._path, self._stored = open_stream, offset, path, shape[1:]
        self._channels_first = note.startswith("NCHW")
        self.count, self.shape, self.dtype, self.labels = shape[0], view.shape[1:], dtype, labels
        self._row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        self.block = max(1, _BLOCK_BYTES // self._row_bytes)
        self.description = {"files": files, "layout": note}
        self._stream: IO[bytes] | None = None
        self._row = 0

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        first, last = int(numbers[0]), int(numbers[-1])
        try:
            self._go_to(first)
            rows = np.frombuffer(self._take(last + 1 - first), self.dtype).reshape(-1, *self._stored)
            self._end_if_all_read()
        except (EOFError, OSError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{self._path} is damaged between the samples {first} and {last}: {error}; restore it") from error
        wanted = rows[numbers - first]
        out[:] = wanted.transpose(0, 2, 3, 1) if self._channels_first else wanted.reshape(out.shape)
        return []

    @override
    def name(self, number: int) -> str:
        return f"{self._path} sample {number}"

    def _go_to(self, row: int) -> None:
        if self._stream is None or row < self._row:
            if self._stream is not None:
                self._stream.close()
            self._stream, self._row = self._open_stream(), 0
            self._exactly(self._offset)
        while self._row < row:
            self._take(min(row - self._row, self.block))

    def _take(self, count: int) -> bytes:
        data = self._exactly(count * self._row_bytes)
        self._row += count
        return data

    def _exactly(self, size: int) -> bytes:
        assert self._stream is not None
        data = bytearray()
        while len(data) < size:
            piece = self._stream.read(size - len(data))
            if not piece:
                raise EOFError("the stream breaks off")
            data += piece
        return bytes(data)

    def _end_if_all_read(self) -> None:
        """At its end a stream compares its checksum."""
        assert self._stream is not None
        if self._row == self.count and self._stream.read(1):
            raise EOFError("it goes on where its array ends")


def open_gzip(path: Path) -> IO[bytes]:
    """The stream of a gzipped file."""
    return cast("IO[bytes]", gzip.open(path))


def open_member(path: Path, name: str) -> IO[bytes]:
    """The stream of a member of a zip archive."""
    return zipfile.ZipFile(path).open(name)
