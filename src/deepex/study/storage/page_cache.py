"""The system's page cache: empty it of some files, so that what reads them next reads the disk, and see whether that was so.

>>> drop_cache(Path("/scratch/packed"))
{'bytes': 4708784, 'resident_bytes': 0, 'cold': True, 'note': 'no page was left in memory'}

Anyone may drop the clean pages of a file (posix_fadvise); those that a process has mapped stay, and a file system that is memory
(/dev/shm) has nothing else. What the server of a shared file system or a disk's controller keeps is out of reach. The system is
asked whether pages are left (mincore).
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from deepex.errors import DataError

_LITTLE: Final = 0.01  # of the bytes: pages that are left of so few do not make a first epoch warm


def drop_cache(path: Path | str) -> dict[str, Any]:
    """Drop the pages of a file, or of all files of a directory, and tell how many are left; null where the system does not tell."""
    path = Path(path)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    try:
        for file in files:
            _drop(file)
        num_bytes = sum(file.stat().st_size for file in files)
        found = [resident_bytes(file) for file in files]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the file or directory of a dataset") from error
    known = [count for count in found if count is not None]
    if len(known) < len(found):
        return {
            "bytes": num_bytes,
            "resident_bytes": None,
            "cold": None,
            "note": "asked for, not verified: the system does not tell",
        }
    left = sum(known)
    note = "no page was left in memory" if not left else f"{left} bytes were left in memory"
    return {"bytes": num_bytes, "resident_bytes": left, "cold": left <= _LITTLE * num_bytes, "note": note}


def resident_bytes(path: Path) -> int | None:
    """How many bytes of a file are in memory, in whole pages but for its end; None where the system does not tell."""
    size = path.stat().st_size
    if not size:
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        arguments = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        told = hasattr(library, "mincore") and library.mincore(*arguments) == 0
        del memory  # else the map could not be closed
    return min(size, int((pages & 1).sum()) * mmap.PAGESIZE) if told else None


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # a page that is not on the disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
