"""Background syncs: the collective of one period runs while the next computes, and its correction is applied when it has come.

At a sync each replica keeps a copy x' of its weights, the sum over all of them is begun, and training goes on at once. A period
later, or after `delay` steps, the mean m of the copies is taken over, x ← x + pull · (m − x'), which waits if it is not there
yet. So a replica's weights are the mean as of a few steps ago and its own steps since (DaSGD: Zhou et al. 2020; Overlap-Local-SGD:
Wang, Liang & Joshi 2020; the paper's "background synchronisation"). The sync at the end of an epoch waits, and makes all equal.

Each sync takes one of `parts` parts of the weights, in turn (as Streaming DiLoCo: Douillard et al. 2025). With the same bytes per
step a part is on its way for that much shorter, and this delay is what learning pays for: until a mean has come, replicas drift
further apart. Validation errors of a convolutional network on Fashion-MNIST, 4 replicas, each weight sent every 11 or 12 steps,
three epochs, means of 3 seeds: 13.9 % with syncs that wait, 14.5 % with all weights at once and a delay of 6 steps, 13.8 % with
four parts and a delay of 3. Where delays are longer, replicas' own steps may have undone the difference by then, and a pull below
1 helps.

What travels so are the weights. Batch-norm statistics and momentum are each replica's own until the end of the epoch: a variance
that is corrected could fall below zero, and momentum of one period ago is not of use today.
A request to stop lies in the first part, and is heard with the mean in which it travelled.
"""

from typing import final

import torch
from typing_extensions import override

from deepex.comm.background import Background, Pending
from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, State
from deepex.sync.region import Region, cut
from deepex.sync.total import Total


@final
class Delayed(Agreement):
    """Three slices more, and one for each replica of a rank that has several.

    Who owns what: from `reach` until it has been waited for, the worker owns the buffer of the part that is under way. `mean` and
    the copies are the caller's. `mean` is of use (`_arrived`) from then until the next `reach`, in the part that came.
    """

    since_epoch = True

    def __init__(
        self, region: Region, total: Total, *, replicas_per_rank: int, worker: Background, pull: float, delay: int, parts: int
    ) -> None:
        super().__init__(region)
        self._total, self._worker, self._pull, self._delay = total, worker, pull, delay
        self._all = slice(0, self._agreed.numel())
        self._parts = cut(max(region.buffers.stop, region.weights.stop), parts)  # in the background
        self._totals = [total.part(part) for part in self._parts]
        self._mean = torch.zeros_like(self._agreed)  # a checkpoint keeps it before all parts have come
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
        turn = number % len(self._parts)
        self._sum: Total = self._total if whole else self._totals[turn]
        self._now: slice = self._all if whole else self._parts[turn]
        self._before = self._parts[turn - 1]
        self._begun, self._whole = False, whole

    @override
    def begin(self, index: int) -> None:
        if not self._lone:
            self._agreed.copy_(self._copies[index])

    @override
    def pauses(self, start: int, stop: int) -> int:
        return min(start + self._delay, stop) if self._delay else stop

    @override
    def pause(self, index: int) -> None:
        self.settle()
        if self._arrived:
            weights, came = self.region.weights, self._before
            part = slice(max(weights.start, came.start), max(weights.start, min(weights.stop, came.stop)))
            self._agreed[part].add_(self._mean[part], alpha=self._pull).sub_(self._copies[index][part], alpha=self._pull)

    @override
    def add(self, index: int, share: float) -> None:
        if not self._begun:  # not in `prepare`: the last sum may still be under way then, in the same memory
            self._sum.clear()
            self._begun = True
        kept = self._now if self._lone else self._all
        self._copies[index][kept].copy_(self._agreed[kept])
        self._sum.add(self._agreed[self._now], share)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        if self.region.asks(self._now):
            self._sum.ask(self.region.request - self._now.start, request)
        self._sum.check()
        self._arrived = False
        if not self._whole:
            self._way, self._pending, self._apart = (self._sum, self._now), self._worker.sum(self._sum.buffer), True
            return
        comm.sum(self._sum.buffer)
        self._take(self._sum, self._now)
        self._agreed.copy_(self._mean)
        self.start()

    @override
    def settle(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._arrived = None, True
            self._take(*self._way)

    def _take(self, total: Total, part: slice) -> None:
        total.into(self._mean[part])
        if self.region.asks(part):
            self._told.copy_(self._mean[self.region.request])
        if len(self._parts) == 1 or part is self._all:
            self.met(self._mean)

    @override
    def close(self) -> None:
        self._worker.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._totals[0].buffer.nbytes

    @override
    def state(self) -> State:
        return State(shared={"mean": self._mean}, own={"weights": self._copies})

    @override
    def kept(self) -> State:
        if not self._apart:
            return State()
        if self._lone:
            self._copies[0].copy_(self._agreed)
        return self.state()
