"""Where a reading comes from: something that counts, asked again and again.

    source = storage()
    source.read()       # {"read_bytes": 4096.0, "written_bytes": 0.0}
    source.close()

Files of the kernel stay open and are read with `pread`: 1 to 2 µs each, where psutil takes 20 to 150. Names are those of `COUNTERS`
and `LEVELS`, and others that only the series of samples has.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, final

from typing_extensions import override

Reading = dict[str, float]

COUNTERS: Final = (  # what only grows
    "cpu_seconds",
    "read_bytes",
    "written_bytes",
    "network_bytes",
    "gpu_busy_seconds",
    "cpu_joules",
    "gpu_joules",
)
LEVELS: Final = ("memory_bytes", "gpu_memory_bytes")  # what goes up and down: its peak counts
NODE_WIDE: Final = ("network_bytes", "cpu_joules")  # measured by the first rank of a node for all of them


class UsageSource(ABC):
    """Something that counts. Making one raises where there is nothing to read."""

    @abstractmethod
    def read(self) -> Reading:
        """What it counts now: since whenever, only differences matter. May raise, or leave out what cannot be read now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and libraries."""


@final
class CounterFiles(UsageSource):
    """Small files of the kernel that stay open; `parse` makes a reading of what is in each."""

    def __init__(self, paths: Iterable[Path], parse: Callable[[list[bytes]], Reading]) -> None:
        self._parse, self._descriptors = parse, list[int]()
        try:
            for path in paths:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            self.read()  # some can be opened, but not read, or say something else than we think
        except BaseException:
            self.close()
            raise

    @override
    def read(self) -> Reading:
        return self._parse([os.pread(descriptor, 4096, 0) for descriptor in self._descriptors])

    @override
    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
