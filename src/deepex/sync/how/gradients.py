"""`gradients`, the classical baseline: the mean of the replicas' gradients, at every step.

With `chunks` above 1, on CPUs, they travel in so many pieces while the backward pass is still at work:

    agreement = Overlapped(synced, slots, chunks=4, worker=Background(comm))
    arena.listeners.append(agreement.hears)

The backward pass finishes the last layers first. As soon as all gradients of a chunk are there, its sum is begun in the background;
chunks are begun from the last to the first, on every rank alike. A sync then waits for what is still under way, and sums the
batch-norm statistics. What overlaps is as much as PyTorch's DDP would, on the arena itself: no buckets, no copies.

Who owns what: a chunk of the gradients is the worker's from the moment that it is begun until `reach` has waited for it; autograd
writes to it in the next step at the earliest.

For users: docs/synchronisation.md#gradients
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from deepex.comm.background import Background, Pending
from deepex.comm.base import Communicator
from deepex.errors import FailureError
from deepex.record.options import PARTS, KeyRules, Options
from deepex.sync.agreement import Agreement
from deepex.sync.how.strategy import AgreementInputs, Strategy
from deepex.sync.synced_slice import SyncedSlice

GradientSlot = tuple[int, int]  # where a weight's gradient begins, and how many numbers it has


@final
class Overlapped(Agreement):
    """One replica per rank. `slots` are those of the weights, in the order of the arena."""

    def __init__(self, synced: SyncedSlice, slots: Sequence[GradientSlot], *, chunks: int, worker: Background) -> None:
        super().__init__(synced)
        self._worker, self._share = worker, 1.0
        ends = synced.buffers.start
        cuts = _cuts(slots, chunks)
        self._parts = [slice(slots[a][0], slots[b][0] if b < len(slots) else ends) for a, b in cuts]
        self._chunk_of = [number for number, (a, b) in enumerate(cuts) for _ in range(a, b)]
        self._sizes = [b - a for a, b in cuts]
        self._missing: list[int] = []
        self._begun: list[Pending] = []
        self._renew()

    def _renew(self) -> None:
        self._missing, self._begun = list(self._sizes), []

    @override
    def begin(self, index: int) -> None:
        self._renew()

    @override
    def expect(self, share: float) -> None:
        self._share = share

    @override
    def hears(self, index: int) -> None:
        """The gradient of weight number `index` is in the arena."""
        chunk = self._chunk_of[index]
        if len(self._parts) - len(self._begun) <= chunk:
            raise FailureError(
                "a weight's gradient came in several pieces (re-entrant checkpointing does that), after its chunk had been sent: "
                "set sync.chunks=1"
            )
        self._missing[chunk] -= 1
        while self._next >= 0 and self._missing[self._next] <= 0:
            self._send()

    @property
    def _next(self) -> int:
        return len(self._parts) - 1 - len(self._begun)

    def _send(self) -> None:
        self._begun.append(self._worker.sum(self._agreed[self._parts[self._next]], self._share))

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        return

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        while self._next >= 0:  # weights that took no part, or a replica whose shard has ended
            self._send()
        self._sum_asking(comm, self._agreed[self.synced.buffers], self._share, request)
        for pending in self._begun:
            pending.wait()

    @override
    def close(self) -> None:
        self._worker.close()


def _cuts(slots: Sequence[GradientSlot], chunks: int) -> list[tuple[int, int]]:
    """Ranges of slots that have about as many numbers each; fewer than `chunks` if a slot is larger than its share."""
    cuts: list[tuple[int, int]] = []
    whole, first, size = sum(count for _, count in slots), 0, 0
    for number, (_, count) in enumerate(slots):
        size += count
        if size * chunks >= whole * (len(cuts) + 1):
            cuts.append((first, number + 1))
            first = number + 1
    return cuts


@dataclass(frozen=True, kw_only=True)
class GradientsOptions(Options):
    """`chunks`: in so many pieces gradients travel; with 1, all at once when the backward pass is over."""

    chunks: int = 1

    rules: ClassVar[KeyRules] = {"chunks": PARTS}


@final
class GradientMean(Strategy):
    """Large-batch SGD."""

    name = "gradients"
    usual_period = 1
    sums_gradients = codable = True

    @override
    def complaint(self, config: Any) -> str | None:
        if config.period in (None, 1):
            return None
        return (
            f"sync.period is {config.period!r}, but gradients are averaged at every step: leave the period out, "
            "or use sync.strategy=weights"
        )

    @override
    def overlaps(self, config: Any) -> bool:
        return bool(config.chunks > 1)

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        slots = inputs.synced.slots
        if config.chunks == 1 or inputs.per_rank > 1 or inputs.fixed or not slots:
            return inputs.mean()  # turns, sums of another type, or nobody who tells when a gradient is there
        return Overlapped(inputs.synced, slots, chunks=config.chunks, worker=Background(inputs.comm))


KIND: Final = GradientMean
