"""Samples that are read from the files ahead of their use, window by window, in bounded memory.

    windows = Windows(samples, verify=True)
    windows.begin(epoch, turns)
    windows.fill(begin, end, images, labels)

One thread reads the pieces of an epoch's windows whole, in large requests, into a ring of rows: the window in use, the next one,
and a batch that may reach over both. So the memory is at most twice the largest window (256 MiB, or a file if that is larger) and a
batch, beside 48 bytes for each of the rank's samples that tell its place. When an epoch is read to its end, the thread goes on with
the next one.

Who owns a row: the reader, from the moment that `freed` is within one ring of it until `loaded` has passed it; then whoever calls
`fill`, until that moves `freed` past it. Both count rows since the start, and change under the lock alone.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.feeds import read_counter
from deepex.data.feeds.order import Piece, cut, window_samples
from deepex.data.feeds.read import ReadInto, Rows, Stopped
from deepex.data.feeds.samples import EpochOrder, Samples, Turn
from deepex.data.feeds.store import Store


class _Load(NamedTuple):
    """A window on its way: its pieces, and the rows that it takes, counted since the start."""

    pieces: tuple[Piece, ...]
    start: int
    stop: int


class _Epoch(NamedTuple):
    """What an epoch reads, by the numbers of its windows, and the row of each place in its order."""

    number: int
    plan: EpochOrder
    loads: dict[int, _Load]
    rows: NDArray[np.int64]
    stop: int


@final
class Windows(Store):
    """The samples of a rank, read ahead; for turns that use one window after another (`one_by_one`)."""

    def __init__(self, samples: Samples, *, verify: bool = False) -> None:
        self._samples = samples
        self._unverified = set(range(len(samples.part.bounds) - 1)) if verify else set[int]()
        self._capacity = ring_rows(samples)
        self._images, self._labels = samples.empty(self._capacity)
        self._change = threading.Condition()
        self._epoch: _Epoch | None = None
        self._ahead: _Epoch | None = None  # the next epoch, from the moment that its reading begins until it is begun
        self._reader: threading.Thread | None = None
        self._stopped = False
        self._error: BaseException | None = None
        self._loaded = self._freed = 0

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        ahead = self._next() if self._reader is not None else None
        if ahead is None or ahead.number != epoch or list(ahead.loads) != visits(ahead.plan, self._samples, turns):
            self.close()
            plan = self._samples.plan(epoch)
            self._epoch = _lay_out(epoch, plan, visits(plan, self._samples, turns), 0)
            self._stopped, self._error, self._loaded, self._freed, self._ahead = False, None, 0, 0, None
            self._reader = read_counter.thread("deepex-read", self._read, self._epoch)
            self._reader.start()
            return
        with self._change:
            self._epoch, self._ahead = ahead, None
            self._change.notify_all()

    @override
    def fill(self, begin: int, end: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        assert self._epoch is not None, "begin comes first"
        epoch, last = self._epoch, self._epoch.plan.windows_of(begin, end)[-1]
        load = epoch.loads[last]
        self._wait(lambda: self._loaded >= load.stop or self._error is not None)
        if self._loaded < load.stop:
            assert self._error is not None
            raise self._error
        rows = epoch.rows[begin:end] % self._capacity
        np.take(self._images, rows, axis=0, out=images, mode="clip")  # "clip": "raise" would buffer `out`
        np.take(self._labels, rows, axis=0, out=labels, mode="clip")
        freed = load.stop if end == epoch.plan.ends[last] else load.start
        if freed != self._freed:  # else the reader would wake at every batch, and take the interpreter from the step
            with self._change:
                self._freed = freed
                self._change.notify_all()

    @override
    def close(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if self._reader is not None:
            self._reader.join()
            self._reader = None

    def _next(self) -> _Epoch | None:
        """The epoch after this one, if this one was used up."""
        assert self._epoch is not None
        if self._freed < self._epoch.stop:
            return None
        with self._change:
            self._change.wait_for(lambda: self._ahead is not None or self._error is not None or self._stopped)
            return self._ahead

    def _wait(self, met: Callable[[], bool]) -> None:
        with self._change:
            self._change.wait_for(lambda: met() or self._stopped)
            if self._stopped and not met():
                raise Stopped

    def _read(self, epoch: _Epoch) -> None:
        """Read an epoch, the one after it, and so on; the thread does nothing else."""
        try:
            while True:
                for load in epoch.loads.values():
                    self._wait(partial(self._has_room, load))
                    self._read_window(load)
                    with self._change:
                        self._loaded = load.stop
                        self._change.notify_all()
                self._wait(lambda: self._ahead is None)
                plan = self._samples.plan(epoch.number + 1)
                epoch = _lay_out(epoch.number + 1, plan, list(range(len(plan.windows))), epoch.stop)
                with self._change:
                    self._ahead = epoch
                    self._change.notify_all()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            with self._change:
                self._error = error
                self._change.notify_all()

    def _has_room(self, load: _Load) -> bool:
        return load.stop - self._capacity <= self._freed

    def _read_window(self, load: _Load) -> None:
        row, bounds = load.start, self._samples.part.bounds
        for start, stop in load.pieces:
            file = int(np.searchsorted(bounds, start, side="right")) - 1
            first, last = start - int(bounds[file]), stop - int(bounds[file])
            sink = Rows(self._targets(first, last, row), self._samples.sample_bytes, lambda: self._stopped)
            self._samples.part.read_file(file, sink, span=(first, last), verify=file in self._unverified)
            self._unverified.discard(file)
            row += last - first

    def _targets(self, first: int, last: int, row: int) -> list[ReadInto]:
        """The rows for a piece; two ranges where the ring ends within it."""
        start = row % self._capacity
        middle = min(last, first + self._capacity - start)
        ranges = ((first, middle, start), (middle, last, 0))
        return [
            ReadInto(low, high, self._images[at : at + high - low], self._labels[at : at + high - low])
            for low, high, at in ranges
            if low < high
        ]


@final
class Maps(Store):
    """The samples of a rank in the files' memory maps; the system's page cache decides what stays in memory.

    Compressed files are unpacked into memory instead, and stay there. For turns that come back to windows, and for a dataset that
    was not packed shuffled, whose window is a whole shard.
    """

    def __init__(self, samples: Samples, *, verify: bool = False) -> None:
        self._samples, self._stopped = samples, False
        self._unverified = set(range(len(samples.part.bounds) - 1)) if verify else set[int]()
        self._order = np.empty(0, np.int64)

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._order = self._samples.plan(epoch).order

    @override
    def fill(self, begin: int, end: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        positions = self._samples.in_files(self._order[begin:end])
        if self._unverified:
            touched = np.unique(np.searchsorted(self._samples.part.bounds, positions, side="right") - 1).tolist()
            for file in self._unverified.intersection(touched):
                sink = Rows([], self._samples.sample_bytes, lambda: self._stopped)
                self._samples.part.read_file(file, sink, verify=True)
                self._unverified.discard(file)
        self._samples.part.gather(positions, images, labels)

    @override
    def close(self) -> None:
        self._stopped = True


@final
class Stream(Store):
    """`Windows` where an epoch's turns go from window to window, `Maps` where they do not."""

    def __init__(self, samples: Samples, *, verify: bool = False) -> None:
        self._samples, self._verify = samples, verify
        self._windows: Windows | None = None
        self._maps: Maps | None = None
        self._current: Store | None = None

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        if one_by_one(self._samples, turns):
            self._windows = self._windows or Windows(self._samples, verify=self._verify)
            self._current = self._windows
        else:
            if self._windows is not None:
                self._windows.close()
                self._windows = None
            self._maps = self._maps or Maps(self._samples, verify=self._verify)
            self._current = self._maps
        self._current.begin(epoch, turns)

    @override
    def fill(self, begin: int, end: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        assert self._current is not None, "begin comes first"
        self._current.fill(begin, end, images, labels)

    @override
    def close(self) -> None:
        for store in filter(None, (self._windows, self._maps)):
            store.close()


def visits(plan: EpochOrder, samples: Samples, turns: Sequence[Turn]) -> list[int]:
    """The windows that these turns use, one after another."""
    found: list[int] = []
    batch = samples.shards.batch
    for replica, start, stop in turns:
        first, end = (bound - samples.start for bound in samples.shards.bounds(replica))
        begin, end = first + start * batch, min(end, first + stop * batch)
        if begin < end:
            used = plan.windows_of(begin, end)
            found.extend(used[1:] if found and found[-1] == used[0] else used)
    return found


def one_by_one(samples: Samples, turns: Sequence[Turn]) -> bool:
    """Whether these turns never come back to a window that they have left: each replica is done before the next one starts."""
    replicas = [replica for replica, _ in groupby(turn.replica for turn in turns)]
    return samples.in_file_order and len(replicas) == len(set(replicas))


def ring_rows(samples: Samples) -> int:
    """The rows of the ring: two of the largest windows there can be, and a batch; or all samples, if they are fewer."""
    pieces = cut((samples.start, samples.stop), samples.part.bounds)
    largest = max([window_samples(samples.sample_bytes), *(stop - start for start, stop in pieces)])
    return min(samples.count, 2 * largest + samples.shards.batch)


def _lay_out(number: int, plan: EpochOrder, windows: Sequence[int], row: int) -> _Epoch:
    """Give each window its rows, from `row` on."""
    loads: dict[int, _Load] = {}
    rows = np.empty(len(plan.order), np.int64)
    for index in windows:
        window, end = plan.windows[index], int(plan.ends[index])
        loads[index] = _Load(window.pieces, row, row + len(window.order))
        rows[end - len(window.order) : end] = row + window.order
        row += len(window.order)
    return _Epoch(number, plan, loads, rows, row)
