"""IDX files, the format of MNIST and of the datasets made in its likeness, plain or compressed with gzip.

A file is two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, then the
values. A plain file is memory-mapped; a compressed one is read into memory.

>>> read_idx(Path("train-images-idx3-ubyte.gz")).shape
(60000, 28, 28)
"""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_BLOCK_BYTES = 16 << 20


def read_idx(path: Path) -> NDArray[Any]:
    """Read the array in an IDX file; one that is damaged or of another kind is named with the offset."""
    try:
        compressed = _is_gzip(path)
        with gzip.open(path) if compressed else path.open("rb") as file:
            return _read_stream(path, file) if compressed else _map(path, file)
    except FileNotFoundError:
        raise DataError(f"file {path} is missing; correct the name or put it there") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions and that it is a file") from error


def stream_header(path: Path) -> tuple[np.dtype[Any], tuple[int, ...], int] | None:
    """The type, shape and offset of the values of a gzipped file; None if it is not gzipped or not whole enough to tell."""
    try:
        if not _is_gzip(path):
            return None
        with gzip.open(path) as file:
            return _read_header(path, file)
    except (OSError, zlib.error, DataError):
        return None


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _read_header(path: Path, file: io.BufferedIOBase) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Read the type, the shape and the offset of the values."""
    magic = _read(file, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or not magic[3]:
        raise DataError(
            f"{path} has the magic number 0x{magic.hex()} at offset 0, so it is not an array file; an IDX file has "
            "0x0000, a type code from 08 to 0e and the number of dimensions: give an IDX, .npy or .npz file"
        )
    sizes = _read(file, 4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise _truncated(path, 4 + len(sizes), 4 + 4 * magic[3], "for its header")
    return np.dtype(_DTYPES[magic[2]]), struct.unpack(f">{magic[3]}I", sizes), 4 + len(sizes)


def _map(path: Path, file: io.BufferedIOBase) -> NDArray[Any]:
    dtype, shape, offset = _read_header(path, file)
    found, expected = path.stat().st_size, offset + math.prod(shape) * dtype.itemsize
    _check_size(path, found, expected, shape)
    if found == offset:
        return np.empty(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, shape))


def _read_stream(path: Path, file: io.BufferedIOBase) -> NDArray[Any]:
    dtype, shape, offset = _read_header(path, file)
    expected = math.prod(shape) * dtype.itemsize
    # The buffer grows with what is really there: a damaged header must not reserve what the file cannot fill. Asking
    # for one byte more than expected makes gzip reach its end mark, where it compares the checksum.
    values = bytearray()
    try:
        while block := file.read1(min(_BLOCK_BYTES, expected + 1 - len(values))):
            values += block
    except EOFError:
        raise _truncated(path, offset + len(values), offset + expected, "its gzip stream breaks off;") from None
    _check_size(path, offset + len(values), offset + expected, shape)
    return np.frombuffer(values, dtype).reshape(shape)


def _read(file: io.BufferedIOBase, size: int) -> bytes:
    """Up to `size` bytes; the end of a truncated gzip stream reads as the end of the data."""
    data = b""
    try:
        while len(data) < size and (piece := file.read1(size - len(data))):
            data += piece
    except EOFError:
        pass
    return data


def _check_size(path: Path, found: int, expected: int, shape: tuple[int, ...]) -> None:
    if found < expected:
        raise _truncated(path, found, expected, f"for an array of shape {shape}")
    if found > expected:
        raise DataError(f"{path} goes on at offset {expected}, where its array of shape {shape} ends; fetch it again")


def _truncated(path: Path, found: int, expected: int, what: str) -> DataError:
    return DataError(
        f"{path} is truncated at offset {found}: {what} {expected} bytes (uncompressed) were expected, {found} found; "
        "fetch it again"
    )
