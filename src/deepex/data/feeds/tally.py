"""How many files of samples this process has opened, and how many bytes it has read from them.

    opened()
    read(1 << 24)
    opens, num_bytes = take()       # since the last time

Counted once for a file and once for a request, of megabytes where files are read whole, so that it costs nothing. Bytes are those
of the files: of compressed arrays as they are stored. Of what is mapped into memory those count that were taken out of it, as the
system reads pages when it sees fit; of HDF5 those that its library gave, unpacked. A stream reads ahead of use, and what it reads
counts when it is read.
"""

from threading import Lock
from typing import Final

_LOCK: Final = Lock()  # train and validation have each a thread that reads
_COUNTS: Final = [0, 0]


def opened(num_bytes: int = 0) -> None:
    """Count a file that was opened, and perhaps read already."""
    with _LOCK:
        _COUNTS[0] += 1
        _COUNTS[1] += num_bytes


def read(num_bytes: int) -> None:
    """Count bytes that were read."""
    with _LOCK:
        _COUNTS[1] += num_bytes


def take() -> tuple[int, int]:
    """Give the files opened and the bytes read since the last time, by all threads of this process."""
    with _LOCK:
        found = _COUNTS[0], _COUNTS[1]
        _COUNTS[:] = 0, 0
        return found


def usage(
    opens: list[float], num_bytes: list[float], other_opens: list[float], other_bytes: list[float]
) -> dict[str, dict[str, list[float]]]:
    """What a record's `usage` has of it, from each rank's counts: opens and bytes for the steps, and those for all else."""
    return {"opens": {"input": opens, "other": other_opens}, "data_bytes": {"input": num_bytes, "other": other_bytes}}
