"""Which rank of a node reads which file, and for whom.

    plan = NodePlan(samples, [range(0, 2), range(2, 4)])       # the replicas of each rank of the node
    plan.files                   # what the node needs
    plan.reader[7]               # the rank that reads file 7
    plan.needs(7)                # whose samples are in it: [Need(rank=0, first=120, last=512, position=3000), …]
    plan.ordered(epoch, turns)   # the files in the order in which the node's ranks come to need them

Each file is read by one rank of a node: the one with most samples in it, or, where a dataset that was not packed shuffled gives
every rank some samples of every file, by all ranks in turn. Every rank works this out alone and finds the same.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds.order import cut
from deepex.data.feeds.samples import Samples, Turn


class Need(NamedTuple):
    """The samples `first` up to `last` of a file are a rank's from `position` on."""

    rank: int
    first: int
    last: int
    position: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.last - self.first


class Scattered(NamedTuple):
    """The samples `rows` of a file (ascending) are a rank's at `positions`."""

    rank: int
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


@final
class NodePlan:
    """The division of the work of reading among the ranks of one node."""

    def __init__(self, samples: Samples, neighbours: Sequence[range]) -> None:
        self._samples, self._neighbours = samples, neighbours
        self._bounds = samples.part.bounds
        self._places: NDArray[np.int64] | None = None
        self.spans = [samples.span(replicas) for replicas in neighbours]
        self._needs = self._find_needs() if samples.in_file_order else {}
        self.files = sorted(self._needs) if samples.in_file_order else list(range(len(self._bounds) - 1))
        self.reader = {file: self._reader(index, file) for index, file in enumerate(self.files)}

    def _find_needs(self) -> dict[int, list[Need]]:
        found: dict[int, list[Need]] = {}
        for rank, span in enumerate(self.spans):
            for first, last in cut(span, self._bounds):
                file = int(np.searchsorted(self._bounds, first, side="right")) - 1
                low = int(self._bounds[file])
                found.setdefault(file, []).append(Need(rank, first - low, last - low, first - span[0]))
        return found

    def needs(self, file: int) -> list[Need]:
        """Who needs which samples of a file of a dataset that was packed shuffled."""
        return self._needs[file]

    def scattered(self, file: int) -> list[Scattered]:
        """Who needs which samples of a file of a dataset that was not packed shuffled."""
        if self._places is None:
            self._places = self._samples.places()
            assert self._places is not None
        places = self._places[self._bounds[file] : self._bounds[file + 1]]
        found = []
        for rank, (start, stop) in enumerate(self.spans):
            rows = np.flatnonzero((places >= start) & (places < stop))
            found.append(Scattered(rank, rows, places[rows] - start))
        return found

    def forget(self) -> None:
        """Give back the memory of the shuffle, when this rank has read all its files."""
        self._places = None

    def files_of(self, rank: int) -> list[int]:
        """The files that a rank waits for."""
        if not self._samples.in_file_order:
            return self.files
        return [file for file in self.files if any(need.rank == rank for need in self.needs(file))]

    def ordered(self, epoch: int, turns: Sequence[Turn]) -> list[int]:
        """The node's files, first the one that some rank needs first when it starts with these turns."""
        if not self._samples.in_file_order:
            return self.files
        first: dict[int, float] = {}
        for replicas in self._neighbours:
            for file, time in self._uses(replicas, epoch, turns):
                first[file] = min(time, first.get(file, time))
        return sorted(self.files, key=lambda file: first[file])

    def _reader(self, index: int, file: int) -> int:
        if not self._samples.in_file_order:
            return index % len(self.spans)
        return max(self.needs(file), key=lambda need: (need.size, -need.rank)).rank

    def _uses(self, replicas: range, epoch: int, turns: Sequence[Turn]) -> Iterator[tuple[int, float]]:
        """Each piece's file, and after how many steps of its rank it is needed.

        All ranks take the same turns but for the replicas. What is behind the start is not needed before the next epoch.
        """
        segments = list(dict.fromkeys((turn.start, turn.stop) for turn in turns))
        for index, replica in enumerate(replicas):
            position = 0
            for group in self._samples.groups(replica, epoch):
                time = _time(position // self._samples.shards.batch, index, len(replicas), segments)
                for piece in group:
                    yield int(np.searchsorted(self._bounds, piece[0], side="right")) - 1, time
                    position += piece[1] - piece[0]


def _time(step: int, index: int, replicas: int, segments: Sequence[tuple[int, int]]) -> float:
    """How many steps a rank takes before `step` of its replica number `index`."""
    before = 0
    for start, stop in segments:
        if step < stop:
            return before + index * (stop - start) + max(0, step - start) if step >= start else float("inf")
        before += replicas * (stop - start)
    return float("inf")
