"""The plain mean of all replicas (local SGD: Stich 2019; with gradients for weights, synchronous SGD). Then all are equal.

- `InPlace`: one replica per rank. The collective works on the arena itself.
- `SharedArenaMean`: several replicas take turns on the arena. Two more slices, however many replicas: what was last agreed, and
  the sum so far.
A replica that has gone astray (`lose`) is left out: it adds nothing but its share, the sum of the others is divided by what is left
of one, and it goes on from there like the others.
"""

import math
from typing import Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import Total

_LONG: Final = 64  # steps, beside which it does not count that a GPU is waited for


class _Mean(Agreement):
    """The mean over all replicas but the lost ones; on a GPU, which is waited for so, only where turns are long."""

    _watched = True

    @property
    @override
    def leaves_out(self) -> bool:
        return self.synced.lost is not None and self._watched

    @override
    def watch(self, steps: int) -> None:
        self._watched = steps >= _LONG or self._agreed.device.type == "cpu"

    def _without_lost(self) -> None:
        """Make the sum over those that were not lost their mean; of none, no number."""
        if not self.leaves_out or not (lost := float(self._agreed[self.synced.lost])):
            return
        left = 1 - lost if bool(self._agreed[self.synced.weights].any()) else math.nan
        self._agreed.div_(left)
        self._agreed[self.synced.lost] = 0.0


@final
class InPlace(_Mean):
    """One replica per rank: its arena is weighted and summed where it lies, in one go."""

    _share = 1.0

    @override
    def begin(self, index: int) -> None:
        return

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._share = share

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._sum_asking(comm, self._agreed, self._share, request)
        self._without_lost()
        self.on_mean(self._agreed)


@final
class SharedArenaMean(_Mean):
    """Several replicas per rank, or sums that do not depend on their order: each turn starts from what was agreed."""

    def __init__(self, synced: SyncedSlice, total: Total) -> None:
        super().__init__(synced)
        self._total, self._own = total, self._agreed[synced.own]
        self._last, self._fresh = torch.empty_like(self._own), True

    @override
    def start(self) -> None:
        self._last.copy_(self._own)
        self._total.clear()
        self._fresh = True

    @override
    def begin(self, index: int) -> None:
        if not self._fresh:
            self._own.copy_(self._last)
        self._fresh = False

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._total.add(self._agreed, share)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._total.ask(self.synced.request, request)
        self._total.reach(comm)
        self._total.into(self._agreed)
        self._without_lost()
        self.on_mean(self._agreed)
        self.start()

    @property
    @override
    def nbytes(self) -> int:
        return self._total.buffer.nbytes
