"""Memory in which the ranks of one node put samples for each other.

    exchange = Exchange(samples, comm, whole=True)  # collective: each rank makes a block of memory and maps those of the others
    part.read_file(7, exchange.sink(7))             # by its reader: the samples go where they belong
    exchange.publish(7)
    exchange.wait(7)                                # by whoever needs them; raises what the reader failed with

A block is written by the readers of the files that its rank needs, each its own rows, and read by its rank once the file's gate is
open. Gate and state of a file, and the message if it failed, stand in the block of its reader, who alone writes them.
Where ranks cannot share memory, each reads for itself.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.comm.base import Communicator
from deepex.comm.shared import share_memory
from deepex.data.feeds.gate import Gates
from deepex.data.feeds.node import Need, NodePlan, Scattered
from deepex.data.feeds.read import ReadInto, Rows, Sink, Stopped, most_rows
from deepex.data.feeds.samples import Samples
from deepex.data.npy import byte_view
from deepex.errors import DataError, told

_FAILED: Final = 1
_TEXT_BYTES: Final = 4096
_ALIGNMENT_BYTES: Final = 64
_PATIENCE_SECONDS: Final = 0.1  # between two looks whether waiting has become pointless


class Block(NamedTuple):
    """A rank's memory: samples, and what it says of the files that it reads."""

    gates: Gates
    states: NDArray[np.uint8]
    text: NDArray[np.uint8]
    labels: NDArray[np.int64]
    images: NDArray[Any]


@final
class Exchange:
    """The blocks of a node's ranks.

    `whole`: a block has room for all samples of its rank, in their order. Else only for those that another rank reads for it, file
    after file; `foreign` tells where.
    """

    def __init__(self, samples: Samples, comm: Communicator | None, *, whole: bool) -> None:
        self._samples, self._whole, self.stopped = samples, whole, threading.Event()
        self._error: BaseException | None = None
        if comm is None or comm.place.num_nodes == comm.size or not self._share(comm):
            self._plan([[0, samples.replicas.start, samples.replicas.stop]], 0)
            self._blocks = [self._block(np.empty(self.num_bytes, np.uint8))]
            self._make_gates()

    def _share(self, comm: Communicator) -> bool:
        """Make and map the blocks; False where that is impossible."""
        local = comm if comm.place.num_nodes == 1 else comm.split(comm.place.node)
        replicas = self._samples.replicas
        self._plan(local.gather([comm.rank, replicas.start, replicas.stop]), local.rank)
        shared = share_memory(local, self.num_bytes) if local.size > 1 else None  # a rank that is alone on its node has split too
        if shared is not None:
            self._blocks = [self._block(shared.of(rank).numpy()) for rank in range(local.size)]
            self._make_gates()
            local.barrier()  # nobody passes a gate that is not made
        if local is not comm:
            local.close()
        return shared is not None

    def _plan(self, neighbours: Sequence[Sequence[int]], own: int) -> None:
        self._ranks, self.own = [rank for rank, _, _ in neighbours], own
        self.plan = NodePlan(self._samples, [range(start, stop) for _, start, stop in neighbours])
        self._number = {file: number for number, file in enumerate(self.plan.files)}
        self._left = {file for file, reader in self.plan.reader.items() if reader == own}
        self._rooms = self._make_rooms()
        spans = [stop - start for start, stop in self.plan.spans]
        self._rows = max(spans if self._whole else [sum(need.size for need, _ in room.values()) for room in self._rooms])

    def _make_rooms(self) -> list[dict[int, tuple[Need, int]]]:
        """For each rank and each file that another reads for it: its samples there, and where they start in a block for such."""
        rooms: list[dict[int, tuple[Need, int]]] = [{} for _ in self._ranks]
        totals = [0] * len(rooms)
        for file in self.plan.files if self._samples.in_file_order else []:
            for need in self.plan.needs(file):
                if need.rank != self.plan.reader[file]:
                    rooms[need.rank][file] = need, totals[need.rank]
                    totals[need.rank] += need.size
        return rooms

    def _sizes(self) -> tuple[int, ...]:
        num_files = len(self.plan.files)
        return num_files * Gates.NUM_BYTES, num_files, _TEXT_BYTES, 8 * self._rows, self._samples.sample_bytes * self._rows

    @property
    def num_bytes(self) -> int:
        """The memory of one block."""
        return sum(map(_aligned, self._sizes()))

    def _block(self, memory: NDArray[np.uint8]) -> Block:
        sizes = self._sizes()
        edges = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        gates, states, text, labels, images = (memory[e : e + size] for e, size in zip(edges, sizes, strict=False))
        part = self._samples.part
        shaped = images.view(part.dtype).reshape(self._rows, *part.sample_shape)
        return Block(Gates(gates, len(self.plan.files)), states, text, labels.view(np.int64), shaped)

    def _make_gates(self) -> None:
        self.block.gates.make()
        self.block.states[:] = 0

    @property
    def block(self) -> Block:
        """This rank's."""
        return self._blocks[self.own]

    @property
    def foreign(self) -> dict[int, tuple[Need, int]]:
        """The files that another rank reads for this one: which samples of it, and where in a block that is not `whole`."""
        return self._rooms[self.own]

    def targets(self, file: int) -> list[ReadInto]:
        """Where the samples of a file go; this rank's own only in blocks that are `whole`."""
        found = []
        for need in self.plan.needs(file):
            if self._whole or need.rank != self.own:
                row = need.position if self._whole else self._rooms[need.rank][file][1]
                block = self._blocks[need.rank]
                rows = slice(row, row + need.size)
                found.append(ReadInto(need.first, need.last, block.images[rows], block.labels[rows]))
        return found

    def sink(self, file: int) -> Sink:
        """What puts a file into blocks that are `whole`."""
        if self._samples.in_file_order:
            return Rows(self.targets(file), self._samples.sample_bytes, self.stopped.is_set)
        low, high = self._samples.part.bounds[file : file + 2].tolist()
        scratch, _ = self._samples.empty(most_rows(high - low, self._samples.sample_bytes))
        targets = [(need, self._blocks[need.rank]) for need in self.plan.scattered(file)]
        return _Scatter(targets, scratch, self.stopped.is_set)

    def span(self, file: int) -> tuple[int, int]:
        """The samples of a file that the node needs lie in this range."""
        if not self._samples.in_file_order:
            low, high = self._samples.part.bounds[file : file + 2].tolist()
            return 0, high - low
        needs = self.plan.needs(file)
        return min(need.first for need in needs), max(need.last for need in needs)

    def publish(self, file: int) -> None:
        """Tell all that the samples of a file are there."""
        self._left.discard(file)
        self.block.gates.open(self._number[file])

    def fail(self, error: BaseException) -> None:
        """Tell all that the files which this rank has not read yet will not come, and why."""
        self._error = error
        text = told(error).encode()[: _TEXT_BYTES - 1]
        self.block.text[:] = 0
        self.block.text[: len(text)] = np.frombuffer(text, np.uint8)
        for file in self._left:
            self.block.states[self._number[file]] = _FAILED
            self.block.gates.open(self._number[file])
        self._left = set()

    def is_ready(self, file: int) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._blocks[self.plan.reader[file]].gates.passed(self._number[file], 0.0)

    def wait(self, file: int) -> None:
        """Return when the samples of a file are there."""
        reader = self.plan.reader[file]
        block, number = self._blocks[reader], self._number[file]
        while not block.gates.passed(number, _PATIENCE_SECONDS):
            if self.stopped.is_set():
                raise Stopped
        if block.states[number] == _FAILED:
            raise self._failure(reader)

    def _failure(self, reader: int) -> BaseException:
        if reader == self.own and self._error is not None:
            return self._error
        message = bytes(self._blocks[reader].text).rstrip(b"\0").decode(errors="replace")
        return DataError(f"{message} (rank {self._ranks[reader]} found this when it read for its node)")


@final
class _Scatter(Sink):
    """Puts the samples of a file of a given order where the shuffle has them."""

    def __init__(self, targets: Sequence[tuple[Scattered, Block]], scratch: NDArray[Any], stopped: Callable[[], bool]) -> None:
        super().__init__(stopped)
        self._targets, self._scratch = targets, scratch

    def take_labels(self, labels: NDArray[np.int64]) -> None:
        for need, block in self._targets:
            block.labels[need.positions] = labels[need.rows]

    def memory(self, first: int, last: int) -> list[memoryview]:
        return [byte_view(self._scratch[: last - first])]

    def filled(self, first: int, last: int) -> None:
        for need, block in self._targets:
            low, high = np.searchsorted(need.rows, (first, last))
            block.images[need.positions[low:high]] = self._scratch[need.rows[low:high] - first]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
