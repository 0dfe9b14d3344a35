"""An agreement after which an optimiser over syncs makes its step.

agreement = Outer(InPlace(synced), make_outer("nesterov", synced, rate=0.7, momentum=0.9, peak=0.1))
"""

from typing import final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.outer.outer_step import OuterStep


@final
class Outer(Agreement):
    """Wraps an agreement after which all replicas are equal."""

    def __init__(self, inner: Agreement, step: OuterStep) -> None:
        super().__init__(inner.synced)
        self._inner, self._step = inner, step
        self._weights = self._agreed[inner.synced.weights]
        self._last = torch.empty_like(self._weights)
        self._inner.on_mean = lambda mean: self.on_mean(mean)  # noqa: PLW0108 - whoever is told of it later

    @override
    def start(self) -> None:
        self._step.start(self._weights)
        self.resume()

    @override
    def resume(self) -> None:
        self._last.copy_(self._weights)
        self._inner.start()

    @override
    def prepare(self, number: int, *, all_parts: bool) -> None:
        self._inner.prepare(number, all_parts=all_parts)

    @override
    def begin(self, index: int) -> None:
        self._inner.begin(index)

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._inner.add(index, share, rate)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._inner.reach(comm, request=request, rate=rate)
        self._step.move(self._last, torch.sub(self._last, self._weights, out=self._weights), rate)
        self._weights.copy_(self._last)
        self._inner.start()

    @property
    @override
    def leaves_out(self) -> bool:
        return self._inner.leaves_out

    @override
    def watch(self, steps: int) -> None:
        self._inner.watch(steps)

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

    @property
    @override
    def requests(self) -> torch.Tensor:
        return self._inner.requests

    @override
    def state(self) -> KeptState:
        inner = self._inner.state()
        return KeptState(shared={**inner.shared, **self._step.state()}, own=inner.own)
