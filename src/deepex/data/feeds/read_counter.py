"""How many files of samples a run has opened, and how many bytes it has read from them.

    with counting():                    # what is read within counts apart from what others read in this process
        opened()
        read(1 << 24)
        reader = thread("deepex-read", work)    # counts here too
        opens, num_bytes = take()       # since the last time

Outside of any `counting`, the process has one count. Each thread has a context of its own, where `counting` holds; `thread` gives a
new one that of its maker.

Counted once for a file and once for a request, of megabytes where files are read whole, so that it costs nothing. Bytes are those
of the files: of compressed arrays as they are stored. Of what is mapped into memory those count that were taken out of it, as the
system reads pages when it sees fit; of HDF5 those that its library gave, unpacked. A stream reads ahead of use, and what it reads
counts when it is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Lock, Thread
from typing import Any, Final


class _Count:
    """Files and bytes since the last time they were taken."""

    def __init__(self) -> None:
        self._lock = Lock()  # train and validation have each a thread that reads
        self._opens, self._num_bytes = 0, 0

    def add(self, opens: int, num_bytes: int) -> None:
        with self._lock:
            self._opens += opens
            self._num_bytes += num_bytes

    def take(self) -> tuple[int, int]:
        with self._lock:
            found = self._opens, self._num_bytes
            self._opens, self._num_bytes = 0, 0
            return found


_CURRENT: Final = ContextVar("deepex-tally", default=_Count())  # noqa: B039 - what is outside of any run shares one


@contextmanager
def counting() -> Iterator[None]:
    """Count apart what is read within."""
    token = _CURRENT.set(_Count())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def thread(name: str, work: Callable[..., None], *arguments: Any) -> Thread:
    """Make a thread, which ends with the process, whose reads count with those of its maker."""
    return Thread(target=copy_context().run, args=(work, *arguments), name=name, daemon=True)


def opened(num_bytes: int = 0) -> None:
    """Count a file that was opened, and perhaps read already."""
    _CURRENT.get().add(1, num_bytes)


def read(num_bytes: int) -> None:
    """Count bytes that were read."""
    _CURRENT.get().add(0, num_bytes)


def take() -> tuple[int, int]:
    """Give the files opened and the bytes read since the last time."""
    return _CURRENT.get().take()


def usage(
    opens: list[float], num_bytes: list[float], other_opens: list[float], other_bytes: list[float]
) -> dict[str, dict[str, list[float]]]:
    """What a record's `usage` has of it, from each rank's counts: opens and bytes for the steps, and those for all else."""
    return {"opens": {"input": opens, "other": other_opens}, "data_bytes": {"input": num_bytes, "other": other_bytes}}
