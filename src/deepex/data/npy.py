"""`.npy` files, mapped with their size checked first, and written atomically with their SHA-256.

`numpy.load` answers a truncated file with "mmap length is greater than filesize"; here the file, the bytes found and
the bytes expected are named.

>>> digest = write_npy(Path("x.npy"), np.zeros((2, 3), np.uint8))
>>> map_npy(Path("x.npy")).shape
(2, 3)
"""

import ast
import hashlib
import io
import lzma
import math
import re
import resource
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from deepex.data.feeds import read_counter
from deepex.errors import DataError
from deepex.record.files import write_atomic

COMPRESSED = ".xz"  # the end of the name of a file that is compressed as a whole

_LENGTH_FORMATS = {1: "<H", 2: "<I"}  # version 3 exists for arrays with named fields only
MOST_HEADER_BYTES = 10_000
_NUMBER_TYPE = re.compile(r"\|[biu]1|[<>]([iu][248]|f[248])")


class _OtherTypeError(ValueError):
    """The array is whole, but its values are not of a type that is read."""


@dataclass(frozen=True, kw_only=True)
class NpyHeader:
    """What a `.npy` file says it holds; its values start at `offset` bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def order(self) -> Literal["C", "F"]:
        """How numpy calls the order of the values."""
        return "F" if self.fortran_order else "C"


def read_header(path: Path) -> NpyHeader:
    """Read the header of `path` and check that the file has exactly the bytes it promises."""
    try:
        with path.open("rb") as file:
            header = parse_header(file)
            found = file.seek(0, io.SEEK_END)
        read_counter.opened(header.offset)
    except FileNotFoundError:
        raise DataError(f"file {path} is missing; restore it or correct the name") from None
    except _OtherTypeError as error:
        raise DataError(f"{path}: {error}; convert them, for example with astype, and save the array again") from error
    except ValueError as error:
        raise DataError(f"{path} is not an array file (.npy): {error}; restore it or save it with numpy.save") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions and that it is a file") from error
    expected = header.offset + math.prod(header.shape) * header.dtype.itemsize
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(
            f"{path} is {what}: it has {found} bytes, but its header ({header.dtype}, shape {header.shape}, values "
            f"from offset {header.offset}) needs {expected}; restore the file"
        )
    return header


def map_npy(path: Path, header: NpyHeader | None = None) -> NDArray[Any]:
    """Map the array in `path` for reading."""
    header = header or read_header(path)
    if math.prod(header.shape) == 0:  # an empty range cannot be mapped
        return np.empty(header.shape, header.dtype)
    mapped = np.memmap(path, header.dtype, "r", header.offset, header.shape, header.order)
    read_counter.opened()
    # As a plain array: each slice of a np.memmap object would carry its attributes along, at many times the cost.
    return np.asarray(mapped)


def load_compressed(path: Path) -> NDArray[Any]:
    """Read a compressed array file into memory."""
    try:
        with lzma.open(path) as file:
            header = parse_header(file)
            # One byte more than promised: a longer file is as wrong as a shorter one.
            expected = math.prod(header.shape) * header.dtype.itemsize
            values = file.read(expected + 1)
        read_counter.opened(path.stat().st_size)
    except FileNotFoundError:
        raise DataError(f"file {path} is missing; restore it or correct the name") from None
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise DataError(f"{path} is not a whole compressed array file: {error}; restore it") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions and that it is a file") from error
    if len(values) != expected:
        raise DataError(f"{path} has {len(values)} bytes of values or more; its header promises {expected}: restore the file")
    return np.frombuffer(values, header.dtype).reshape(header.shape, order=header.order)


def write_npy(path: Path, array: NDArray[Any], *, flush: bool = True) -> str:
    """Write a C-contiguous array to `path`, atomically, compressed if the name says so; return the SHA-256 of the file."""
    buffer = io.BytesIO()
    npy_format.write_array_header_1_0(buffer, npy_format.header_data_from_array_1_0(array))
    pieces: tuple[bytes | memoryview, ...] = (buffer.getvalue(), byte_view(array))
    if path.suffix == COMPRESSED:
        pieces = (lzma.compress(b"".join(pieces), preset=6 | lzma.PRESET_EXTREME),)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)

    write_atomic(path, write, flush=flush)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def remember(maps: dict[str, NDArray[Any]], name: str, values: NDArray[Any]) -> None:
    """Keep a map, and forget the oldest ones beyond a quarter of the open files that a process may have: each holds one."""
    maps[name] = values
    while len(maps) > max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
        maps.pop(next(iter(maps)), None)  # another thread may have done so


def byte_view(array: NDArray[Any]) -> memoryview:
    """Give the bytes of a C-contiguous array, not copied."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides} is not C-contiguous")
    return array.reshape(-1).view(np.uint8).data


def parse_header(file: IO[bytes]) -> NpyHeader:
    """Read the header, raising ValueError if anything about it is not as numpy writes it for numbers.

    numpy's own function answers a damaged header with errors of the tokenizer, or with a warning and a guess.
    """
    major, _ = npy_format.read_magic(file)
    if major not in _LENGTH_FORMATS:
        raise ValueError(f"its format version is {major}")
    length_format = _LENGTH_FORMATS[major]
    (length,) = struct.unpack(length_format, _exactly(file, struct.calcsize(length_format)))
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"its header claims to have {length} bytes")
    try:
        table = ast.literal_eval(_exactly(file, length).decode("latin1"))
        descr, shape, fortran_order = table["descr"], table["shape"], table["fortran_order"]
    except (SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError("its header is damaged") from error
    if not (isinstance(descr, str) and _NUMBER_TYPE.fullmatch(descr)):
        raise _OtherTypeError(f"it holds values of type {_type_name(descr)}, not plain numbers of up to 64 bits")
    if not (isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"its shape is {shape!r}")
    order = bool(fortran_order) and len(shape) > 1
    return NpyHeader(shape=shape, dtype=np.dtype(descr), fortran_order=order, offset=file.tell())


def _type_name(descr: object) -> str:
    try:
        return str(np.dtype(descr)) if isinstance(descr, str) else repr(descr)
    except TypeError:
        return repr(descr)


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"it ends within its header, at offset {file.tell()}")
    return data
