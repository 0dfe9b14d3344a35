"""`elastic`, elastic averaging (EASGD: Zhang, Choromańska, LeCun 2015): replicas explore on their own, tied to a centre by springs.

At a sync, with z the centre and x̄ the mean of the R replicas: each x ← x − (β/R)·(x − z), and z ← z + β·(x̄ − z), where β is
`elasticity`. The centre is what is validated, kept and delivered; replicas are never equal. Each needs a slice of its own.

For users: docs/synchronisation.md#elastic
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.record.options import SHARE, KeyRules, Options
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.how.strategy import AgreementInputs, Strategy, slices_of_each
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import Total


@final
class Springs(Agreement):
    """A state for each replica of the rank, and the centre. Between turns the arena holds the centre."""

    since_epoch = True

    def __init__(self, synced: SyncedSlice, total: Total, *, replicas_per_rank: int, replicas: int, elasticity: float) -> None:
        super().__init__(synced)
        self._total, self._pull, self._step = total, elasticity / replicas, elasticity
        self._centre = torch.empty_like(self._agreed)
        self._states = [torch.empty_like(self._agreed) for _ in range(replicas_per_rank)]

    @override
    def start(self) -> None:
        for state in self._states:
            state.copy_(self._agreed)
        self.resume()

    @override
    def resume(self) -> None:
        self._centre.copy_(self._agreed)
        self._total.clear()

    @override
    def begin(self, index: int) -> None:
        self._agreed.copy_(self._states[index])

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._total.add(self._agreed, share)
        torch.lerp(self._agreed, self._centre, self._pull, out=self._states[index])

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._total.ask(self.synced.request, request)
        self._total.reach(comm)
        self._total.into(self._agreed)
        self._total.clear()
        self.on_mean(self._agreed)
        stop_flag = self._agreed[self.synced.request].clone()
        self._centre.lerp_(self._agreed, self._step)
        self._agreed.copy_(self._centre)
        self._agreed[self.synced.request].copy_(stop_flag)

    @property
    @override
    def nbytes(self) -> int:
        return self._total.buffer.nbytes

    @override
    def state(self) -> KeptState:
        return KeptState(own={"weights": self._states})


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(Options):
    """`elasticity`: how strongly the springs pull."""

    elasticity: float = 0.9

    rules: ClassVar[KeyRules] = {"elasticity": SHARE}


@final
class Elastic(Strategy):
    """Replicas that explore."""

    name = "elastic"

    @override
    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        return slices_of_each(per_rank)

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        total, elasticity = inputs.make(inputs.synced.agreed), config.elasticity
        return Springs(inputs.synced, total, replicas_per_rank=inputs.per_rank, replicas=inputs.replicas, elasticity=elasticity)


KIND: Final = Elastic
