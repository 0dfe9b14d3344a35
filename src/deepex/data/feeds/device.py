"""A rank's samples on its accelerator, as they are packed: filled in the background while training has begun.

    feed = DeviceFeed(samples, torch.device("cuda"), comm, verify=True)      # collective

One thread reads the rank's files, request by request, into one of two pinned buffers, and queues its copy to the device on a stream
of its own. A file is handed out when all of it was read and its SHA-256 is right: then its event is recorded behind its last copy.
`next` waits on the host until the files of its batch have come so far, and makes the step's stream wait for their events; when all
have been waited for, a batch is one gather and nothing else.

Samples that another rank of the node reads come through the memory that the ranks share (exchange.py). Those of a dataset that was
not packed shuffled are scattered over all files; they are collected in host memory first.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.data.feeds import read_counter
from deepex.data.feeds.cache import Cache
from deepex.data.feeds.exchange import Exchange
from deepex.data.feeds.feed import Batch, Feed
from deepex.data.feeds.read import ReadInto, Rows, Sink, Stopped, most_rows
from deepex.data.feeds.samples import EpochOrder, Samples, Turn


@final
class DeviceFeed(Feed):
    """The whole of the rank's samples on the device; a batch is one gather there."""

    def __init__(self, samples: Samples, device: torch.device, comm: Communicator | None = None, *, verify: bool = False) -> None:
        self._samples, self._device, self._verify = samples, device, verify
        cache = None if samples.in_file_order else Cache(samples, comm, verify=verify)
        exchange = Exchange(samples, comm, whole=False) if cache is None else cache.exchange
        self._cache: Cache | None = cache
        self._exchange: Exchange | None = exchange
        self._memory = _DeviceMemory(samples, device, exchange.plan.files)
        self.images, self.labels = self._memory.images, self._memory.labels
        self._awaited = set(exchange.plan.files_of(exchange.own))
        self._loader: threading.Thread | None = None
        self._plan: EpochOrder | None = None
        self.order = torch.zeros(samples.count, dtype=torch.int64, device=device)
        self._batches: Iterator[tuple[int, int]] = iter(())

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._plan = self._samples.plan(epoch)
        self.order.copy_(torch.from_numpy(self._plan.order))
        self._batches = self._samples.batches(turns)
        if self._loader is None:
            exchange, cache = self._exchange, self._cache
            assert exchange is not None
            if cache is not None:
                cache.begin(epoch, turns)
            self._loader = read_counter.thread("deepex-load", self._load, exchange.plan.ordered(epoch, turns), exchange, cache)
            self._loader.start()

    @override
    def next(self) -> Batch:
        begin, end = next(self._batches)
        if self._awaited:
            self._wait(begin, end)
        indices = self.order[begin:end]
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)

    def skip(self, count: int) -> None:
        """Go on by some batches: what the current stream does from then on finds their samples here. Not for use with `next`."""
        if self._awaited:  # else nobody cares which they are
            for begin, end in islice(self._batches, count):
                self._wait(begin, end)

    @override
    def close(self) -> None:
        exchange, cache = self._exchange, self._cache
        if exchange is not None:
            exchange.stopped.set()
        self._memory.stop()
        if cache is not None:
            cache.close()
        if self._loader is not None:
            self._loader.join()

    def _wait(self, begin: int, end: int) -> None:
        assert self._plan is not None, "begin comes first"
        for number in self._plan.windows_of(begin, end):
            for file in self._awaited.intersection(self._samples.files_of(self._plan.windows[number])):
                self._memory.wait(file)
                self._awaited.discard(file)

    def _load(self, files: Sequence[int], exchange: Exchange, cache: Cache | None) -> None:
        """Bring all samples to the device; the thread does nothing else."""
        try:
            with self._memory.context():
                if cache is None:
                    self._load_files(files, exchange)
                else:
                    cache.wait_for_all()
                    self._memory.put(0, cache.images, cache.labels)
                    self._memory.arrived(*files)
                    cache.finish()
            self._exchange = self._cache = None  # the samples are on the device now
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            if cache is None and not isinstance(error, Stopped):  # else its own reader tells the others
                exchange.fail(error)
            self._memory.fail(error)
        finally:
            self._memory.release()

    def _load_files(self, files: Sequence[int], exchange: Exchange) -> None:
        """First all that others may be waiting for; what others read for this rank is taken when it is there."""
        pending = set(exchange.foreign)
        for file in files:
            if exchange.plan.reader[file] == exchange.own:
                sink = _ToDevice(exchange, file, self._memory, self._samples.sample_bytes)
                self._samples.part.read_file(file, sink, span=exchange.span(file), verify=self._verify)
                exchange.publish(file)
                self._memory.arrived(file)
            for ready in [other for other in pending if exchange.is_ready(other)]:
                exchange.wait(ready)
                self._take(ready, exchange)
                pending.discard(ready)
        for file in (file for file in files if file in pending):
            exchange.wait(file)
            self._take(file, exchange)

    def _take(self, file: int, exchange: Exchange) -> None:
        """Bring to the device what another rank has read."""
        (need, row), block = exchange.foreign[file], exchange.block
        rows = slice(row, row + need.size)
        self._memory.put(need.position, block.images[rows], block.labels[rows])
        self._memory.arrived(file)


@final
class _DeviceMemory:
    """The samples on the device, and two pinned buffers through which they come.

    Who owns a buffer: the thread that loads, but for the time that a copy from it is queued; the buffer's event tells when that is
    over. Labels have a pinned array of their own, each place of which is written once.
    """

    def __init__(self, samples: Samples, device: torch.device, files: Sequence[int]) -> None:
        self._device = device
        cuda = device.type == "cuda"
        images, labels = map(torch.from_numpy, samples.empty(0))
        self.images = torch.empty((samples.count, *images.shape[1:]), dtype=images.dtype, device=device)
        self.labels = torch.zeros(samples.count, dtype=labels.dtype, device=device)  # none that is no class, ever
        largest = max((int(samples.part.bounds[file + 1] - samples.part.bounds[file]) for file in files), default=1)
        self._rows = min(most_rows(largest, samples.sample_bytes), max(1, samples.count))
        self._buffers = [torch.empty((self._rows, *images.shape[1:]), dtype=images.dtype, pin_memory=cuda) for _ in range(2)]
        self._pinned_labels = torch.empty(samples.count, dtype=labels.dtype, pin_memory=cuda)
        self._side = torch.cuda.Stream(device) if cuda else None
        self._copied: list[Any] = [torch.cuda.Event() if cuda else None for _ in range(2)]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))  # whose memory this was may still be using it
        self._change, self._events = threading.Condition(), dict[int, Any]()
        self._error: BaseException | None = None
        self._stopped = False

    def context(self) -> AbstractContextManager[object]:
        """In which copies are queued on the side stream."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def buffer(self) -> torch.Tensor:
        """The buffer whose turn it is, once it is free."""
        if self._side is not None:
            self._copied[0].synchronize()
        return self._buffers[0]

    def send(self, position: int, count: int) -> None:
        """Queue the copy of the first rows of that buffer; the other one's turn is next."""
        self.images[position : position + count].copy_(self._buffers[0][:count], non_blocking=True)
        if self._side is not None:
            self._copied[0].record(self._side)
        self._buffers.reverse()
        self._copied.reverse()

    def send_labels(self, position: int, labels: NDArray[np.int64]) -> None:
        """Queue the copy of some labels."""
        rows = slice(position, position + len(labels))
        self._pinned_labels[rows].numpy()[:] = labels
        self.labels[rows].copy_(self._pinned_labels[rows], non_blocking=True)

    def put(self, position: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        """Queue the copies of samples that lie in host memory."""
        for first in range(0, len(images), self._rows):
            some = images[first : first + self._rows]
            self.buffer()[: len(some)].numpy()[:] = some
            self.send(position + first, len(some))
        self.send_labels(position, labels)

    def arrived(self, *files: int) -> None:
        """Tell that all copies of these files are queued."""
        event = None if self._side is None else torch.cuda.Event()
        if event is not None:
            event.record(self._side)
        with self._change:
            self._events.update(dict.fromkeys(files, event))
            self._change.notify_all()

    def wait(self, file: int) -> None:
        """Return when a file's copies are queued; what the current stream does from then on comes after them."""
        with self._change:
            self._change.wait_for(lambda: file in self._events or self._error is not None or self._stopped)
        if file not in self._events:
            raise self._error or Stopped
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(self._events[file])

    def fail(self, error: BaseException) -> None:
        """Let whoever waits raise `error`."""
        with self._change:
            self._error = error
            self._change.notify_all()

    def stop(self) -> None:
        """Let go whoever waits."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def release(self) -> None:
        """Give the pinned memory back; torch keeps it until the last copy is done."""
        self._buffers, self._pinned_labels = [], torch.empty(0, dtype=torch.int64)


@final
class _ToDevice(Sink):
    """Puts a file's samples where the ranks of the node want them: this one's own on the device."""

    def __init__(self, exchange: Exchange, file: int, memory: _DeviceMemory, row_bytes: int) -> None:
        super().__init__(exchange.stopped.is_set)
        self._memory, self._row_bytes = memory, row_bytes
        self._others = exchange.targets(file)
        (self._need,) = (need for need in exchange.plan.needs(file) if need.rank == exchange.own)

    def take_labels(self, labels: NDArray[np.int64]) -> None:
        Rows(self._others, self._row_bytes).take_labels(labels)
        self._memory.send_labels(self._need.position, labels[self._need.first : self._need.last])

    def memory(self, first: int, last: int) -> list[memoryview]:
        low, high = self._own(first, last)
        own = []
        if low < high:
            own = [ReadInto(low, high, self._memory.buffer()[: high - low].numpy(), np.empty(0, np.int64))]
        return Rows([*self._others, *own], self._row_bytes).memory(first, last)

    def filled(self, first: int, last: int) -> None:
        low, high = self._own(first, last)
        if low < high:
            self._memory.send(self._need.position + low - self._need.first, high - low)

    def _own(self, first: int, last: int) -> tuple[int, int]:
        return max(first, self._need.first), min(last, self._need.last)
