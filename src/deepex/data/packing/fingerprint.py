"""What an unfinished packing knows its source by: the state of the object that reads it, and the dates of its files."""

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from deepex.data.source.base import Images
from deepex.data.source.folder import is_list, listed_files
from deepex.data.source.walk import walk

_MOST_STAMPS: Final = 1000  # of each input: millions of files would each cost the file system a request


def stamps(inputs: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every input, and of the first 1,000 files that are in a folder or that a list names."""
    return [_stamp(file) for path in inputs for file in _files(path)]


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from islice((folder / name for folder, names in walk(path.resolve()) for name in names), _MOST_STAMPS)
        return
    yield path.resolve()
    if is_list(path):  # whose names are relative to where it was found, were it a link
        yield from islice(listed_files(path.absolute()), _MOST_STAMPS)


def _stamp(file: Path) -> tuple[str, int, int]:
    name = os.fsencode(file).hex()
    for look in (os.stat, os.lstat):  # a link that leads nowhere has a size and a date of its own
        with suppress(OSError):
            status = look(file)
            return name, status.st_size, status.st_mtime_ns
    return name, -1, -1  # gone meanwhile, which is told when it is read


def feed(digest: Any, value: object) -> None:
    """Add `value` and all that it holds to a hash of hashlib."""
    if isinstance(value, dict):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            feed(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} of".encode())
        for inner in value:
            feed(digest, inner)
    elif isinstance(value, bytes | bytearray | array | np.ndarray):
        digest.update(f"{type(value).__name__} {len(value)}:".encode())
        digest.update(np.ascontiguousarray(np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray) else value).data)
    elif isinstance(value, Images) or type(value).__module__.startswith("deepex."):
        digest.update(type(value).__qualname__.encode())
        feed(digest, value.__getstate__())
    else:
        digest.update(repr(value).encode("utf-8", "surrogateescape"))
