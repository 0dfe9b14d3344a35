"""What hands a step its batch: the three placements behind one contract.

    feed.begin(epoch, [Turn(replica=0, start=0, stop=94)])
    images, labels = feed.next()        # raw samples on the device, valid until the next call

`device`: the rank's samples live on the accelerator and a batch is gathered there (device.py). `host`: they are cached in host
memory (cache.py). `stream`: they are read from the files ahead of use (window.py). For these two, on a GPU, a worker thread fills
one of two slots while the step computes on the other. On a CPU there is nothing to copy to, and a batch is gathered when it is
asked for: that takes microseconds, less than waking a thread, which would also take a core from the step.
All three hand out the same samples in the same order.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from deepex.data.feeds import read_counter
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.store import Store

Batch = tuple[torch.Tensor, torch.Tensor]


class Feed(ABC):
    """Hands out the batches of an epoch, in the order of its turns."""

    @abstractmethod
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        """Start an epoch, or a part of one."""

    @abstractmethod
    def next(self) -> Batch:
        """Give the next batch: raw samples (count, H, W, C) and labels, on the device, valid until the next call.

        Raises StopIteration after the last.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop what works in the background."""


@final
class HostFeed(Feed):
    """Batches in host memory, gathered from a store when they are asked for."""

    def __init__(self, samples: Samples, store: Store) -> None:
        self._samples, self._store = samples, store
        self._arrays = samples.empty(samples.shards.batch)
        self._tensors = tuple(map(torch.from_numpy, self._arrays))
        self._batches: Iterator[tuple[int, int]] = iter(())

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._store.begin(epoch, turns)
        self._batches = self._samples.batches(turns)

    @override
    def next(self) -> Batch:
        begin, end = next(self._batches)
        images, labels = self._arrays
        self._store.fill(begin, end, images[: end - begin], labels[: end - begin])
        return self._tensors[0][: end - begin], self._tensors[1][: end - begin]

    @override
    def close(self) -> None:
        self._store.close()


@dataclass
class _Slot:
    """One of two batch buffers.

    Who owns it: the worker from the moment it takes it off `free` until it puts it on `ready`; the consumer from then until its
    next call of `next`. On a GPU two events carry that order across streams: the worker's copy waits for `consumed` (the step that
    used the device side has been queued before it), the step waits for `copied`, and the host side is written again only after
    `copied` has happened.
    """

    host_images: torch.Tensor
    host_labels: torch.Tensor
    images: torch.Tensor
    labels: torch.Tensor
    copied: Any = None
    consumed: Any = None
    count: int = field(default=0)


@final
class SlotFeed(Feed):
    """Batches that a worker thread takes from a store ahead of their use, into two slots on the device.

    An exception in the worker is raised by `next`.
    """

    def __init__(self, samples: Samples, store: Store, device: torch.device) -> None:
        self._samples, self._store, self._device = samples, store, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [self._make_slot() for _ in range(2)]
        self._held: _Slot | None = None
        self._free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Slot | BaseException | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._end_worker()
        self._free, self._ready, self._held = queue.SimpleQueue(), queue.SimpleQueue(), None
        for slot in self._slots:
            self._free.put(slot)
        self._store.begin(epoch, turns)
        self._worker = read_counter.thread("deepex-feed", self._work, list(turns), self._free, self._ready)
        self._worker.start()

    @override
    def next(self) -> Batch:
        self._release()
        slot = self._ready.get()
        if isinstance(slot, BaseException):
            raise slot
        if slot is None:
            raise StopIteration
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.copied)
        self._held = slot
        return slot.images[: slot.count], slot.labels[: slot.count]

    @override
    def close(self) -> None:
        self._store.close()  # first: the worker may be waiting there
        self._end_worker()

    def _end_worker(self) -> None:
        self._release()
        if self._worker is not None:
            self._free.put(None)
            self._worker.join()
            self._worker = None

    def _release(self) -> None:
        if self._held is None:
            return
        if self._side is not None:
            self._held.consumed.record(torch.cuda.current_stream(self._device))
        self._free.put(self._held)
        self._held = None

    def _work(
        self,
        turns: list[Turn],
        free: "queue.SimpleQueue[_Slot | None]",
        ready: "queue.SimpleQueue[_Slot | BaseException | None]",
    ) -> None:
        try:
            for begin, end in self._samples.batches(turns):
                slot = free.get()
                if slot is None:
                    return
                self._fill(slot, begin, end)
                ready.put(slot)
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            ready.put(error)

    def _fill(self, slot: _Slot, begin: int, end: int) -> None:
        count = end - begin
        if self._side is not None:
            slot.copied.synchronize()
        self._store.fill(begin, end, slot.host_images[:count].numpy(), slot.host_labels[:count].numpy())
        slot.count = count
        if self._side is not None:
            with torch.cuda.stream(self._side):
                self._side.wait_event(slot.consumed)
                slot.images[:count].copy_(slot.host_images[:count], non_blocking=True)
                slot.labels[:count].copy_(slot.host_labels[:count], non_blocking=True)
                slot.copied.record(self._side)

    def _make_slot(self) -> _Slot:
        images, labels = map(torch.from_numpy, self._samples.empty(self._samples.shards.batch))
        if self._side is None:
            return _Slot(images, labels, images, labels)
        images, labels = images.pin_memory(), labels.pin_memory()
        on_device = images.to(self._device), labels.to(self._device)
        return _Slot(images, labels, *on_device, torch.cuda.Event(), torch.cuda.Event())
