"""What an unfinished packing knows its source by: the state of the object that reads it, and the dates of its files."""

import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from deepex.data.source.base import Images

_MOST_STAMPS: Final = 1000  # of each input: millions of files would each cost the file system a request


def stamps(inputs: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every input; of a folder, those of its first 1,000 files."""
    found = []
    for path in inputs:
        for file in islice(_files(path.resolve()), _MOST_STAMPS):
            status = os.stat(file, follow_symlinks=False)
            found.append((os.fsencode(file).hex(), status.st_size, status.st_mtime_ns))
    return found


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, inner, names in os.walk(path):
        inner.sort()
        yield from (Path(folder, name) for name in sorted(names))


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
