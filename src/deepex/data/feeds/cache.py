"""A rank's samples in host memory, as they are packed: read once, in the background, while training has begun.

    cache = Cache(samples, comm, verify=True)       # collective
    cache.begin(epoch, turns)                       # starts the reading with what these turns need first
    cache.fill(begin, end, images, labels)          # waits for the files of this batch, no others

Ranks of one node read each file once between them (exchange.py). A file is handed out when all of it was read and its SHA-256 is
right, so no step ever sees a sample of a damaged file.
"""

import threading
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.data.feeds import read_counter
from deepex.data.feeds.exchange import Exchange
from deepex.data.feeds.order import Window
from deepex.data.feeds.read import Stopped
from deepex.data.feeds.samples import EpochOrder, Samples, Turn
from deepex.data.feeds.store import Store


@final
class Cache(Store):
    """All samples of a rank. `images` and `labels` are valid where they have been waited for."""

    def __init__(self, samples: Samples, comm: Communicator | None = None, *, verify: bool = False) -> None:
        self._samples, self._verify = samples, verify
        self.exchange = Exchange(samples, comm, whole=True)
        block = self.exchange.block
        self.images, self.labels = block.images[: samples.count], block.labels[: samples.count]
        self._awaited = set(self.exchange.plan.files_of(self.exchange.own))
        self._plan: EpochOrder | None = None
        self._reader: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """The memory that this rank added to its node's."""
        return self.exchange.num_bytes

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._plan = self._samples.plan(epoch)
        if self._reader is None:
            plan, own = self.exchange.plan, self.exchange.own
            files = [file for file in plan.ordered(epoch, turns) if plan.reader[file] == own]
            self._reader = read_counter.thread("deepex-read", self._read, files)
            self._reader.start()

    @override
    def fill(self, begin: int, end: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        assert self._plan is not None, "begin comes first"
        if self._awaited:
            for number in self._plan.windows_of(begin, end):
                self._wait(self._plan.windows[number])
        rows = self._plan.order[begin:end]
        np.take(self.images, rows, axis=0, out=images, mode="clip")  # "clip": "raise" would buffer `out`
        np.take(self.labels, rows, axis=0, out=labels, mode="clip")

    def wait_for_all(self) -> None:
        """Return when all samples are there."""
        for file in sorted(self._awaited):
            self.exchange.wait(file)
            self._awaited.discard(file)

    def finish(self) -> None:
        """Return when this rank has read all that it reads, for others too."""
        if self._reader is not None:
            self._reader.join()

    @override
    def close(self) -> None:
        self.exchange.stopped.set()
        self.finish()

    def _wait(self, window: Window) -> None:
        for file in self._awaited.intersection(self._samples.files_of(window)):
            self.exchange.wait(file)
            self._awaited.discard(file)

    def _read(self, files: Sequence[int]) -> None:
        """Read this rank's share of the files; its thread does nothing else."""
        exchange = self.exchange
        try:
            for file in files:
                self._samples.part.read_file(file, exchange.sink(file), span=exchange.span(file), verify=self._verify)
                exchange.publish(file)
            exchange.plan.forget()
        except Stopped:  # this rank closes: the others close too, or it failed and ends them with its own message
            return
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            exchange.fail(error)
