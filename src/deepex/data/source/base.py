"""What packing draws from: samples that can be read by number, whatever they come from.

    images = ImageFiles(paths, labels, …)                     # or an HDF5 file, a trajectory, a simulation
    out = np.empty((3, *images.shape), images.dtype)
    bad = images.read(np.array([0, 5, 17]), out)              # ascending numbers; [] if all is well

An implementation must survive pickling (worker processes get a copy) and opens files when it reads, not before. It never changes
data silently: what it cannot give exactly as told is `Bad`, with a reason that a person can act on.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Bad(NamedTuple):
    """A sample that could not be read: its place in the numbers asked for, the name of its file, and why."""

    place: int
    name: str
    reason: str


class UnreadableError(Exception):
    """Why this file gives no sample: a clause about "it", with what can be done."""


class Images(ABC):
    """`count` samples, each (height, width, channels) = `shape` of `dtype`, and their `labels` if there are any.

    `block`: samples that are cheapest read together, in ascending order (a compressed chunk, a trajectory, the patterns of one
    specimen); 1 if any sample costs the same on its own. `busy`: reading is computing (decoding, simulating), so that more
    processes help. `portable`: a pickled copy is small and works in another process; an array in memory is not. `description`
    goes into the manifest's `source`: plain JSON values; names of files, never paths.
    """

    count: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    labels: NDArray[np.int64] | None = None
    block: int = 1
    busy: bool = False
    portable: bool = True
    description: dict[str, Any]

    @abstractmethod
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        """Write the samples of these ascending numbers into the rows of `out`; name the bad ones, whose rows are left undefined.

        What makes all further reading pointless (a missing file of many samples, a wrong option) is raised as DataError.
        """

    @abstractmethod
    def name(self, number: int) -> str:
        """What a message calls this sample: its file, and where in it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Train samples, validation samples where the source has its own, and the names of the classes where it knows them.

    `options`: which fields of the configuration that are not for every kind of source have an effect on this one.
    """

    train: Images
    validation: Images | None = None
    classes: tuple[str, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # for the manifest's `source`
    options: tuple[str, ...] = ()
