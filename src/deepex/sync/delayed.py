"""Background syncs: the collective of one period runs while the next computes, and its correction is applied when it has come.

At a sync each replica keeps a copy x' of its weights, the sum over all of them is begun, and training goes on at once. At the next
sync the mean m of the copies is there, and each replica takes over what the others had learnt: x ← x + (m − x'). So a replica's
weights are the mean as of one period ago and its own steps since (delayed averaging: Wang, Liang, Joshi 2020, Overlap-Local-SGD;
Zhou et al. 2020, DaSGD; the paper's "background synchronisation"). The sync at the end of an epoch waits, and makes all equal.

Batch-norm statistics are each replica's own until then: a variance that is corrected so could fall below zero.
A request to stop is heard one sync later, with the mean in which it travelled.
"""

from typing import final

import torch
from typing_extensions import override

from deepex.comm.background import Background, Pending
from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, State
from deepex.sync.region import Region
from deepex.sync.total import Total


@final
class Delayed(Agreement):
    """Three slices more, and one for each replica of a rank that has several.

    Who owns what: from `reach` until it has been waited for, the worker owns the total's buffer. `mean` and the copies are the
    caller's. `mean` is of use (`_arrived`) from then until the next `reach`.
    """

    since_epoch = True

    def __init__(self, region: Region, total: Total, *, replicas_per_rank: int, worker: Background) -> None:
        super().__init__(region)
        self._total, self._worker = total, worker
        self._mean = torch.empty_like(self._agreed)
        self._copies = [torch.empty_like(self._agreed) for _ in range(replicas_per_rank)]
        self._lone, self._whole = replicas_per_rank == 1, True
        self._pending: Pending | None = None
        self._arrived = self._apart = False
        self._told = torch.zeros((), dtype=self._agreed.dtype, device=self._agreed.device)

    @override
    def start(self) -> None:
        for copy in self._copies:
            copy.copy_(self._agreed)
        self._arrived = self._apart = False
        self._total.clear()

    @override
    def resume(self) -> None:
        """The checkpoint was taken right after a sync: each replica is equal to its copy, and the mean of them is there."""
        self._arrived = self._apart = True
        self._total.clear()
        if self._lone:
            self._agreed.copy_(self._copies[0])

    @override
    def prepare(self, number: int, *, whole: bool) -> None:
        self._whole = whole

    @override
    def begin(self, index: int) -> None:
        if not self._lone:
            self._agreed.copy_(self._copies[index])

    @override
    def add(self, index: int, share: float) -> None:
        self.settle()
        if self._arrived:
            for part in self.region.moved:
                self._agreed[part].add_(self._mean[part]).sub_(self._copies[index][part])
        self._copies[index].copy_(self._agreed)
        self._total.add(self._agreed, share)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._total.ask(self.region.request, request)
        self._total.check()
        self._arrived = False
        if not self._whole:
            self._pending, self._apart = self._worker.sum(self._total.buffer), True
            return
        comm.sum(self._total.buffer)
        self._take()
        self._agreed.copy_(self._mean)
        self.start()

    @override
    def settle(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._arrived = None, True
            self._take()

    def _take(self) -> None:
        self._total.into(self._mean)
        self._total.clear()
        self._told.copy_(self._mean[self.region.request])
        self.met(self._mean)

    @override
    def close(self) -> None:
        self._worker.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._total.buffer.nbytes

    @property
    @override
    def requests(self) -> torch.Tensor:
        return self._told

    @override
    def state(self) -> State:
        return State(shared={"mean": self._mean}, own={"weights": self._copies})

    @override
    def kept(self) -> State:
        return self.state() if self._apart else State()
