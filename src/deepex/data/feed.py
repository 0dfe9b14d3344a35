"""What hands a step its batch: the three placements behind one contract.

    feed.begin(epoch, [Turn(replica=0, start=0, stop=94)])
    images, labels = feed.next()        # raw samples on the device, valid until the next call

`device`: the rank's samples live on the accelerator and a batch is gathered there. `host`: they are cached in host memory, and
`stream`: they stay in the files; for both, a worker thread fills one of two slots while the step computes on the other.
All three hand out the same samples in the same order.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from deepex.data.dataset import PackedPart
from deepex.data.shard import Shards, dataset_order, epoch_order

Batch = tuple[torch.Tensor, torch.Tensor]
Gather = Callable[[NDArray[np.int64], NDArray[Any], NDArray[np.int64]], None]


class Turn(NamedTuple):
    """A replica's steps from `start` up to `stop`, run one after another."""

    replica: int
    start: int
    stop: int


class Samples:
    """The samples of the replicas `first` up to `last` of a part, and the order in which an epoch visits them."""

    def __init__(self, part: PackedPart, shards: Shards, replicas: range, *, seed: int, shuffled: bool) -> None:
        self.part, self.shards, self.replicas, self.seed = part, shards, replicas, seed
        self.start, self.stop = shards.bounds(replicas[0])[0], shards.bounds(replicas[-1])[1]
        self._global_order = None if shuffled else dataset_order(part.count, seed=seed)[self.start : self.stop]

    def read(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All samples of these replicas in host memory, in a few large reads where the dataset is packed shuffled."""
        if self._global_order is None:
            return self.part.read(self.start, self.stop)
        images, labels = self.empty(self.stop - self.start)
        self.part.gather(self._global_order, images, labels)
        return images, labels

    def empty(self, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Uninitialised arrays for `count` samples."""
        return np.empty((count, *self.part.sample_shape), self.part.dtype), np.empty(count, np.int64)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Positions among these samples, shard after shard, in the order of `epoch`."""
        parts = [
            epoch_order(self.shards, r, seed=self.seed, epoch=epoch) + (self.shards.bounds(r)[0] - self.start)
            for r in self.replicas
        ]
        return np.concatenate(parts)

    def batches(self, turns: Sequence[Turn]) -> Iterator[tuple[int, int]]:
        """Bounds in the epoch's order of each batch of `turns`. A turn ends early where its shard does."""
        for replica, start, stop in turns:
            first, end = (bound - self.start for bound in self.shards.bounds(replica))
            for step in range(start, stop):
                begin = first + step * self.shards.batch
                if begin >= end:
                    break
                yield begin, min(begin + self.shards.batch, end)

    def in_files(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn positions among these samples into positions in the part."""
        return indices + self.start if self._global_order is None else self._global_order[indices]


class Feed(ABC):
    """Hands out the batches of an epoch, in the order of its turns."""

    @abstractmethod
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        """Start an epoch, or the rest of one."""

    @abstractmethod
    def next(self) -> Batch:
        """Give the next batch: raw samples (count, H, W, C) and labels, on the device, valid until the next call."""

    @abstractmethod
    def close(self) -> None:
        """Stop what works in the background."""


@final
class DeviceFeed(Feed):
    """The whole of the rank's samples on the device; a batch is one gather there."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self._samples, self._device = samples, device
        images, labels = samples.read()
        self._images = torch.from_numpy(images).to(device)
        self._labels = torch.from_numpy(labels).to(device)
        self._order = torch.empty(0, dtype=torch.int64)
        self._batches: Iterator[tuple[int, int]] = iter(())

    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:  # noqa: D102 - see the base
        self._order = torch.from_numpy(self._samples.order(epoch)).to(self._device)
        self._batches = self._samples.batches(turns)

    def next(self) -> Batch:  # noqa: D102
        begin, end = next(self._batches)
        indices = self._order[begin:end]
        return self._images.index_select(0, indices), self._labels.index_select(0, indices)

    def close(self) -> None:  # noqa: D102
        return


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
class ThreadedFeed(Feed):
    """Batches that a worker thread gathers ahead of their use, into two slots: `host` and `stream`.

    `gather(positions, images, labels)` writes samples into host arrays. An exception in the worker is raised by `next`.
    """

    def __init__(self, samples: Samples, device: torch.device, gather: Gather) -> None:
        self._samples, self._device, self._gather = samples, device, gather
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [self._make_slot() for _ in range(2)]
        self._held: _Slot | None = None
        self._free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Slot | BaseException | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:  # noqa: D102 - see the base
        self.close()
        self._free, self._ready, self._held = queue.SimpleQueue(), queue.SimpleQueue(), None
        for slot in self._slots:
            self._free.put(slot)
        order = self._samples.order(epoch)
        arguments = (order, list(turns), self._free, self._ready)
        self._worker = threading.Thread(target=self._work, args=arguments, name="deepex-feed", daemon=True)
        self._worker.start()

    def next(self) -> Batch:  # noqa: D102
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

    def close(self) -> None:  # noqa: D102
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
        order: NDArray[np.int64],
        turns: list[Turn],
        free: "queue.SimpleQueue[_Slot | None]",
        ready: "queue.SimpleQueue[_Slot | BaseException | None]",
    ) -> None:
        try:
            for begin, end in self._samples.batches(turns):
                slot = free.get()
                if slot is None:
                    return
                self._fill(slot, order[begin:end])
                ready.put(slot)
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            ready.put(error)

    def _fill(self, slot: _Slot, positions: NDArray[np.int64]) -> None:
        count = len(positions)
        if self._side is not None:
            slot.copied.synchronize()
        self._gather(positions, slot.host_images[:count].numpy(), slot.host_labels[:count].numpy())
        slot.count = count
        if self._side is not None:
            with torch.cuda.stream(self._side):
                self._side.wait_event(slot.consumed)
                slot.images[:count].copy_(slot.host_images[:count], non_blocking=True)
                slot.labels[:count].copy_(slot.host_labels[:count], non_blocking=True)
                slot.copied.record(self._side)

    def _make_slot(self) -> _Slot:
        pinned = self._side is not None
        raw_images, raw_labels = self._samples.empty(self._samples.shards.batch)
        images, labels = torch.from_numpy(raw_images), torch.from_numpy(raw_labels)
        if not pinned:
            return _Slot(images, labels, images, labels)
        images, labels = images.pin_memory(), labels.pin_memory()
        on_device = images.to(self._device), labels.to(self._device)
        return _Slot(images, labels, *on_device, torch.cuda.Event(), torch.cuda.Event())


def host_feed(samples: Samples, device: torch.device) -> ThreadedFeed:
    """`host`: read once, cached as it was packed."""
    images, labels = samples.read()

    def gather(positions: NDArray[np.int64], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        np.take(images, positions, axis=0, out=images_out, mode="clip")  # "clip": "raise" would buffer `out`
        np.take(labels, positions, axis=0, out=labels_out, mode="clip")

    return ThreadedFeed(samples, device, gather)


def stream_feed(samples: Samples, device: torch.device) -> ThreadedFeed:
    """`stream`: read from the memory-mapped files, ahead of use."""

    def gather(positions: NDArray[np.int64], images_out: NDArray[Any], labels_out: NDArray[np.int64]) -> None:
        samples.part.gather(samples.in_files(positions), images_out, labels_out)

    return ThreadedFeed(samples, device, gather)
