"""Background syncs: the collective of one period runs while the next computes, and its correction is applied when it has come.

At a sync each replica keeps a copy x' of its weights, the sum over all of them is begun, and training goes on at once. Half a
period later, or after `delay` steps, the mean m of the copies is taken over, x ← x + pull · (m − x'), which waits if it is not
there yet. So a replica's weights are the mean as of a few steps ago and its own steps since (DaSGD: Zhou et al. 2020;
Overlap-Local-SGD: Wang, Liang & Joshi 2020; the paper's "background synchronisation"). The sync at the end of an epoch waits, and
makes all equal.

The longer the delay, the more of the difference a replica's own steps have undone by then, where the loss is steep, so that a pull
of 1 overshoots. Validation errors of a LeNet on 2 / 4 replicas, period 8, 8 epochs, means of 3 seeds: 14.2 / 16.4 % with a sync
that waits, 14.1 / 17.6 % with delay 4 and pull 0.8, 14.6 / 18.2 % with delay 8 and pull 0.5.

What travels so are the weights. Batch-norm statistics and momentum are each replica's own until the end of the epoch: a variance
that is corrected could fall below zero, and momentum of one period ago is not of use today.
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

    def __init__(
        self, region: Region, total: Total, *, replicas_per_rank: int, worker: Background, pull: float, delay: int
    ) -> None:
        super().__init__(region)
        self._total, self._worker, self._pull, self._delay = total, worker, pull, delay
        self._sent = slice(0, max(region.buffers.stop, region.weights.stop))  # in the background
        self._part = total.part(self._sent)
        self._mean = torch.empty_like(self._agreed)
        self._copies = [torch.empty_like(self._agreed) for _ in range(replicas_per_rank)]
        self._lone = replicas_per_rank == 1
        self.prepare(0, whole=True)
        self._pending: Pending | None = None
        self._arrived = self._apart = False
        self._told = torch.zeros((), dtype=self._agreed.dtype, device=self._agreed.device)

    @override
    def start(self) -> None:
        for copy in self._copies:
            copy.copy_(self._agreed)
        self._arrived = self._apart = False

    @override
    def resume(self) -> None:
        """The checkpoint was taken right after a sync: each replica is equal to its copy, and the mean of them is there."""
        self._arrived = self._apart = True
        if self._lone:
            self._agreed.copy_(self._copies[0])

    @override
    def prepare(self, number: int, *, whole: bool) -> None:
        self._sum: Total = self._total if whole else self._part
        self._now = slice(0, len(self._mean)) if whole else self._sent
        self._begun, self._whole = False, whole

    @override
    def begin(self, index: int) -> None:
        if not self._lone:
            self._agreed.copy_(self._copies[index])

    @override
    def pauses(self, start: int, stop: int) -> int:
        return min(start + (self._delay or -(-(stop - start) // 2)), stop)

    @override
    def pause(self, index: int) -> None:
        self.settle()
        if self._arrived:
            part = self.region.weights
            self._agreed[part].add_(self._mean[part], alpha=self._pull).sub_(self._copies[index][part], alpha=self._pull)

    @override
    def add(self, index: int, share: float) -> None:
        if not self._begun:  # not in `prepare`: the last sum may still be under way then, in the same memory
            self._sum.clear()
            self._begun = True
        self._copies[index].copy_(self._agreed)
        self._sum.add(self._agreed[self._now], share)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._sum.ask(self.region.request, request)
        self._sum.check()
        self._arrived = False
        if not self._whole:
            self._pending, self._apart = self._worker.sum(self._sum.buffer), True
            return
        comm.sum(self._sum.buffer)
        self._take(self._total, slice(0, len(self._mean)))
        self._agreed.copy_(self._mean)
        self.start()

    @override
    def settle(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._arrived = None, True
            self._take(self._part, self._sent)

    def _take(self, total: Total, part: slice) -> None:
        total.into(self._mean[part])
        self._told.copy_(self._mean[self.region.request])
        self.met(self._mean)

    @override
    def close(self) -> None:
        self._worker.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._part.buffer.nbytes

    @override
    def state(self) -> State:
        return State(shared={"mean": self._mean}, own={"weights": self._copies})

    @override
    def kept(self) -> State:
        return self.state() if self._apart else State()
