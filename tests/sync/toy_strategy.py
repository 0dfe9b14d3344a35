"""A strategy in one file, as CONTRIBUTING has it for an exercise: replicas go only some of the way to their mean.

`lazy`: of the change that replicas agree on, `laziness` is left out. With 1 nothing is ever learnt.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.record.options import KeyRules, Options
from deepex.sync.agreement import Agreement
from deepex.sync.how.strategy import AgreementInputs, Strategy


@dataclass(frozen=True, kw_only=True)
class LazyOptions(Options):
    """`laziness`: the part of each change that is left out."""

    laziness: float = 0.5

    rules: ClassVar[KeyRules] = {"laziness": (lambda value: 0 <= value <= 1, "from 0 to 1")}


@final
class LazyMean(Agreement):
    """Wraps the plain mean, of one replica per rank or of several."""

    def __init__(self, inner: Agreement, laziness: float) -> None:
        super().__init__(inner.synced)
        self._inner, self._laziness = inner, laziness
        self._weights = self._agreed[inner.synced.weights]
        self._last = torch.empty_like(self._weights)
        inner.on_mean = lambda mean: self.on_mean(mean)  # noqa: PLW0108 - whoever is told of it later

    @override
    def start(self) -> None:
        self._last.copy_(self._weights)
        self._inner.start()

    @override
    def begin(self, index: int) -> None:
        self._inner.begin(index)

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._inner.add(index, share, rate)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._inner.reach(comm, request=request, rate=rate)
        self._weights.lerp_(self._last, self._laziness)
        self.start()

    @property
    @override
    def requests(self) -> torch.Tensor:
        return self._inner.requests


@final
class Lazy(Strategy):
    """For those who have time."""

    name = "lazy"
    usual_period = "4 per epoch"
    makes_equal = True

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        return LazyMean(inputs.mean(), config.laziness)


KIND: Final = Lazy
