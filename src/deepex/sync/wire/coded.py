"""Fewer bytes per sync: changes travel as bf16 or int8, and what rounding lost is added to the next one (error feedback).

    agreement = Coded(synced, wires()["int8"], make_total, replicas_per_rank=1, ranks=4)

What is coded is each replica's weighted change since the last agreement, plus what coding the last one lost; then the sum of all
changes, likewise. Nothing is lost for good, only late (Seide et al. 2014; Karimireddy et al. 2019; both sides as in Tang et al.
2021). An all-reduce in two halves moves 1 or 2 bytes per weight instead of 4: ranks exchange coded parts, each sums the part that
is its own, and all gather the coded sums. Batch-norm statistics go as they are: a variance that is rounded could fall below zero.

With several replicas per rank, each is coded as if it had
a rank of its own, which is the arithmetic that matters for learning; their sum then travels in fp32.
"""

from typing import final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import MakeTotal
from deepex.sync.wire.code import BLOCK, Code


@final
class Coded(Agreement):
    """The plain mean over a coded wire; afterwards all replicas are equal.

    Beside what was last agreed, one vector of the changes, one of what coding lost of each replica's, and one of what it lost of
    their sum. A rank that codes its own part of the sum has the loss of that part alone, until `settle` gathers them.
    """

    def __init__(self, synced: SyncedSlice, code: Code, make: MakeTotal, *, replicas_per_rank: int, ranks: int) -> None:
        super().__init__(synced)
        self._wire = code
        (self._coded,), self._raw = synced.moved, synced.buffers
        self._count, buffers = self._coded.stop - self._coded.start, self._raw.stop - self._raw.start
        self._ranks = ranks if replicas_per_rank == 1 else 1  # that code
        self._padded, self._parts = _multiple(self._count, BLOCK * self._ranks), _multiple(buffers, self._ranks) // self._ranks
        self._work = self._agreed.new_zeros(self._padded + self._parts * self._ranks)  # changes, then buffers
        self._total = make(self._work[: self._padded // self._ranks + self._parts])
        self._errors = [self._agreed.new_zeros(self._padded) for _ in range(replicas_per_rank)]
        self._error = self._agreed.new_zeros(self._padded)
        self._last, self._fresh = torch.zeros_like(self._agreed), True  # zero: gradients are their own change
        self._stop_flag, self._codes = self._agreed.new_zeros(()), (self._work, self._work)
        self._comm: Communicator | None = None

    @override
    def start(self) -> None:
        own = self.synced.own
        self._last[own].copy_(self._agreed[own])
        self._total.clear()
        self._fresh = True

    @override
    def begin(self, index: int) -> None:
        own = self.synced.own
        if not self._fresh:
            self._agreed[own].copy_(self._last[own])
        self._fresh = False

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        changes, buffers = self._work[: self._count], self._work[self._padded :]
        if share:
            torch.sub(self._agreed[self._coded], self._last[self._coded], out=changes).mul_(share)
            torch.mul(self._agreed[self._raw], share, out=buffers[: self._raw.stop - self._raw.start])
        else:
            self._work.zero_()
        self._codes = self._code(self._work[: self._padded], self._errors[index])
        if self._ranks == 1:
            self._total.add(self._work, 1.0)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._comm = comm
        if self._ranks > 1:
            self._over_the_wire(comm, request)
        else:
            place = self._padded + self.synced.request - self._raw.start
            self._total.ask(place, request)
            self._total.reach(comm)
            self._total.into(self._work)
            self._stop_flag.copy_(self._work[place])
            self._code(self._work[: self._padded], self._error)
        torch.add(self._last[self._coded], self._work[: self._count], out=self._agreed[self._coded])
        self._agreed[self._raw].copy_(self._work[self._padded :][: self._raw.stop - self._raw.start])
        self.on_mean(self._agreed)
        self.start()

    def _code(self, values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make values what their codes stand for, with what was lost before; keep what is lost now."""
        values.add_(error)
        codes = self._wire.encode(values)
        error.copy_(values)
        self._wire.decode(*codes, out=values)
        error.sub_(values)
        return codes

    def _over_the_wire(self, comm: Communicator, request: float) -> None:
        """Exchange coded parts, sum this rank's, and gather the coded sums."""
        asked = self._agreed.new_full((comm.size, 1), request)
        received = comm.exchange(_rows(comm.size, *self._codes, self._work[self._padded :], asked))
        part, size = self._work.new_empty(self._total.buffer.numel()), self._padded // comm.size
        *rows, requests = self._split(received, 1)
        for codes, scales, buffers in zip(*rows, strict=True):
            self._wire.decode(codes, scales, out=part[:size])
            part[size:].copy_(buffers)
            self._total.add(part, 1.0)
        self._total.check()
        self._total.into(part)
        mine = slice(comm.rank * size, (comm.rank + 1) * size)
        sums = self._code(part[:size], self._error[mine])
        gathered = comm.gather_rows(_rows(1, *sums, part[size:])[0])
        codes, scales, buffers, _ = self._split(gathered, 0)
        self._wire.decode(codes.reshape(-1), scales.reshape(-1), out=self._work[: self._padded])
        self._work[self._padded :].copy_(buffers.reshape(-1))
        self._stop_flag.copy_(requests.amax())

    def _split(self, rows: torch.Tensor, requests: int) -> tuple[torch.Tensor, ...]:
        """Codes, scales, buffers and requests of rows of bytes."""
        size, kind = self._padded // self._ranks, self._wire.dtype
        sizes = [size * kind.itemsize, 4 * self._wire.num_scales(size), 4 * self._parts, 4 * requests]
        found = [part.contiguous() for part in rows.split(sizes, 1)]
        return found[0].view(kind), *(part.view(torch.float32) for part in found[1:])

    @override
    def settle(self) -> None:
        if self._ranks > 1 and self._comm is not None:
            size, rank = self._padded // self._ranks, self._comm.rank
            self._error.copy_(self._comm.gather_rows(self._error[rank * size : (rank + 1) * size]).view(-1))

    @property
    @override
    def nbytes(self) -> int:
        """Of the codes, scales and buffers that are exchanged, and then gathered."""
        codes, scales = self._padded * self._wire.dtype.itemsize, 4 * self._wire.num_scales(self._padded)
        return codes + scales + self._parts * self._ranks * 4

    @override
    def state(self) -> KeptState:
        return KeptState(
            shared={"error": self._error[: self._count]}, own={"error": [error[: self._count] for error in self._errors]}
        )


def _rows(number: int, *parts: torch.Tensor) -> torch.Tensor:
    """Cut each tensor into `number` equal parts, and put the bytes of those side by side."""
    return torch.cat([part.reshape(number, -1).view(torch.uint8) for part in parts if part.numel()], 1)


def _multiple(count: int, unit: int) -> int:
    return -(-count // unit) * unit
