"""Gates in memory that processes share: shut until the one who is responsible opens them, then open for good.

    gates = Gates(memory, count=3)         # any memory of 3 × Gates.NUM_BYTES that starts on a multiple of 8 bytes
    gates.make()                           # once, by one process, before anybody uses them
    gates.open(1)                          # what was written before is seen by whoever passes
    gates.passed(1, seconds=0.1)           # True; False if it is still shut by then

A gate is a POSIX semaphore. It orders memory between processes (POSIX.1-2017, 4.12), which a plain flag would not on processors
that reorder writes (ARM), and whoever waits sleeps.
"""

import ctypes
import errno
from time import time
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class Gates:
    """`count` gates in `memory`, which must stay valid."""

    NUM_BYTES: Final = 64  # sizeof(sem_t) is 32 with glibc and musl; a cache line each

    def __init__(self, memory: NDArray[np.uint8], count: int) -> None:
        assert len(memory) >= count * self.NUM_BYTES
        assert memory.ctypes.data % 8 == 0
        self._memory = memory  # keeps it alive
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        self._places = [ctypes.c_void_p(memory.ctypes.data + k * self.NUM_BYTES) for k in range(count)]

    def make(self) -> None:
        """Make all gates, shut."""
        for place in self._places:
            self._check(self._library.sem_init(place, 1, 0))

    def open(self, number: int) -> None:
        """Open a gate."""
        self._check(self._library.sem_post(self._places[number]))

    def passed(self, number: int, seconds: float) -> bool:
        """Wait for a gate to open, at most so long. Whether it did."""
        until = time() + seconds
        moment = _Moment(int(until), int(until % 1 * 1e9))
        while self._library.sem_timedwait(self._places[number], ctypes.byref(moment)):
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "sem_timedwait")
        self.open(number)  # for the next
        return True

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "a semaphore failed")
