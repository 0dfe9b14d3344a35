"""Momentum over syncs: the change that replicas agreed on is taken as a gradient, and stepped along with momentum.

    agreement = OuterMomentum(InPlace(region), nesterov=True, rate=0.7, momentum=0.9)

With z the weights last agreed, m the mean of the replicas' and d = z − m:
- SlowMo (Wang et al. 2020): u ← momentum · u + d / γ, z ← z − rate · γ · u, with γ the replicas' rate at the sync.
- Nesterov, as in DiLoCo (Douillard et al. 2023): u ← momentum · u + d, z ← z − rate · (d + momentum · u).
Every rank computes the same from the same numbers, so nothing is sent. Batch-norm statistics and the replicas' own momentum are the
mean and no more.
"""

from typing import final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, State


@final
class OuterMomentum(Agreement):
    """Wraps an agreement after which all replicas are equal."""

    def __init__(self, inner: Agreement, *, nesterov: bool, rate: float, momentum: float) -> None:
        super().__init__(inner.region)
        self._inner, self._nesterov, self._rate, self._momentum = inner, nesterov, rate, momentum
        self._weights = self._agreed[inner.region.weights]
        self._last, self._velocity = torch.empty_like(self._weights), torch.zeros_like(self._weights)
        self._inner.met = self._tell
        self.since_epoch = inner.since_epoch

    def _tell(self, mean: torch.Tensor) -> None:
        self.met(mean)

    @override
    def start(self) -> None:
        self._last.copy_(self._weights)
        self._inner.start()

    @override
    def prepare(self, number: int, *, whole: bool) -> None:
        self._inner.prepare(number, whole=whole)

    @override
    def begin(self, index: int) -> None:
        self._inner.begin(index)

    @override
    def add(self, index: int, share: float) -> None:
        self._inner.add(index, share)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._inner.reach(comm, request=request, rate=rate)
        scale = 1.0 if self._nesterov else rate
        change = torch.sub(self._last, self._weights, out=self._weights)
        self._velocity.mul_(self._momentum).add_(change, alpha=1 / scale)
        if self._nesterov:
            self._last.sub_(change, alpha=self._rate).sub_(self._velocity, alpha=self._rate * self._momentum)
        else:
            self._last.sub_(self._velocity, alpha=self._rate * scale)
        self._weights.copy_(self._last)
        self._inner.start()

    @override
    def settle(self) -> None:
        self._inner.settle()

    @override
    def close(self) -> None:
        self._inner.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._inner.nbytes

    @override
    def state(self) -> State:
        inner = self._inner.state()
        return State(shared={**inner.shared, "velocity": self._velocity}, own=inner.own)
