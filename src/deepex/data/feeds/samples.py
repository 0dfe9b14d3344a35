"""The samples of one rank, and which of them each batch of an epoch takes.

samples = Samples(part, Shards(6000, 4, 32), range(2, 4), seed=1, shuffled=True)
plan = samples.plan(epoch=3)
for begin, end in samples.batches([Turn(replica=2, start=0, stop=47)]):
    plan.order[begin:end]       # positions among the rank's samples
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds.order import Piece, Window, dataset_order, epoch_groups, epoch_windows
from deepex.data.feeds.read import Sink


class Turn(NamedTuple):
    """A replica's steps from `start` up to `stop`, run one after another."""

    replica: int
    start: int
    stop: int


class Split(Protocol):
    """Who has which samples, in batches of which size: see shard.py."""

    @property
    def batch(self) -> int:
        """Samples in a full batch."""

    def bounds(self, replica: int) -> Piece:
        """The samples of a replica."""


class SampleFiles(Protocol):
    """A part of a dataset, as far as feeds use it: PackedPart is one.

    File k holds the samples `bounds[k]` up to `bounds[k + 1]`, and is what is read at once: some tens of megabytes.
    """

    count: int
    sample_shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    bounds: NDArray[np.int64]

    def read_file(self, number: int, sink: Sink, *, span: Piece | None = None, verify: bool = False) -> None:
        """Hand a file, or a span of it, to `sink`; `verify` compares its SHA-256."""

    def gather(self, indices: NDArray[Any], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        """Copy samples in any order."""


class EpochOrder(NamedTuple):
    """An epoch of a rank: its windows, shard after shard; where each ends in the order; the order itself.

    The order has positions among the rank's samples; a batch is a range of it.
    """

    windows: list[Window]
    ends: NDArray[np.int64]
    order: NDArray[np.int64]

    def windows_of(self, begin: int, end: int) -> range:
        """Which windows a batch takes its samples from."""
        first, last = np.searchsorted(self.ends, (begin, end - 1), side="right")
        return range(int(first), int(last) + 1)


class Samples:
    """The samples of some replicas of a part, and the order in which an epoch visits them.

    `shuffled`: the part was shuffled when it was packed. Else one fixed shuffle of the whole part comes first, and a shard is a
    slice of that. Without a `seed` the samples come as they are packed.
    """

    def __init__(self, part: SampleFiles, shards: Split, replicas: range, *, seed: int | None, shuffled: bool) -> None:
        self.part, self.shards, self.replicas, self.seed = part, shards, replicas, seed
        self.start, self.stop = self.span(replicas)
        self.count = self.stop - self.start
        self.in_file_order = shuffled or seed is None
        self.sample_bytes = int(np.prod(part.sample_shape)) * part.dtype.itemsize
        self._in_files = None if self.in_file_order else self._shuffle()[self.start : self.stop]
        self._cuts = part.bounds if self.in_file_order else np.array([0, part.count])

    def span(self, replicas: range) -> Piece:
        """The range of the part that these replicas have, in the part's order or in its shuffle."""
        return (self.shards.bounds(replicas[0])[0], self.shards.bounds(replicas[-1])[1]) if replicas else (0, 0)

    def empty(self, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Uninitialised arrays for `count` samples."""
        return np.empty((count, *self.part.sample_shape), self.part.dtype), np.empty(count, np.int64)

    def plan(self, epoch: int) -> EpochOrder:
        """The windows and the order of an epoch."""
        shards = [epoch_windows(*self._shard(replica), **self._keys(replica, epoch)) for replica in self.replicas]
        windows = [window for shard in shards for window in shard]
        visited = [window.visited for window in windows]
        order = np.concatenate([*visited, np.empty(0, np.int64)]) - self.start
        return EpochOrder(windows, np.cumsum([len(some) for some in visited], dtype=np.int64), order)

    def groups(self, replica: int, epoch: int) -> list[list[Piece]]:
        """The pieces of each window of any replica, also one of another rank."""
        return epoch_groups(*self._shard(replica), **self._keys(replica, epoch))

    def batches(self, turns: Sequence[Turn]) -> Iterator[Piece]:
        """Bounds in the epoch's order of each batch of `turns`. A turn ends early where its shard does."""
        for replica, start, stop in turns:
            first, end = (bound - self.start for bound in self.shards.bounds(replica))
            for step in range(start, stop):
                begin = first + step * self.shards.batch
                if begin >= end:
                    break
                yield begin, min(begin + self.shards.batch, end)

    def files_of(self, window: Window) -> list[int]:
        """The files that hold the samples of a window."""
        if self._in_files is not None:
            return list(range(len(self.part.bounds) - 1))
        firsts = [piece[0] for piece in window.pieces]
        return [int(file) for file in np.searchsorted(self.part.bounds, firsts, side="right") - 1]

    def in_files(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn positions among these samples into positions in the files."""
        return positions + self.start if self._in_files is None else self._in_files[positions]

    def places(self) -> NDArray[np.int64] | None:
        """Where each sample of the files stands in the part's shuffle; None where it is not shuffled here."""
        if self.in_file_order:
            return None
        in_files = self._shuffle()
        places = np.empty_like(in_files)
        places[in_files] = np.arange(len(places))
        return places

    def _shuffle(self) -> NDArray[np.int64]:
        assert self.seed is not None
        return dataset_order(self.part.count, seed=self.seed)

    def _shard(self, replica: int) -> tuple[Piece, NDArray[np.int64]]:
        return self.shards.bounds(replica), self._cuts

    def _keys(self, replica: int, epoch: int) -> dict[str, Any]:
        return {"seed": self.seed, "replica": replica, "epoch": epoch, "sample_bytes": self.sample_bytes}
