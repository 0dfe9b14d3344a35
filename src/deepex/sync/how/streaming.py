"""`streaming`, partial syncs in turn: each sync brings one part of the arena to its mean, the next sync the next part.

A sync sends 1/`parts` of the bytes, so the peak demand on the network is that much lower at the same period, or the period can be
that much shorter at the same demand (the paper's "inter-network synchronisation"; Streaming DiLoCo: Douillard et al. 2025). Between
syncs replicas differ in the parts whose turn it was not. The sync at the end of an epoch takes all parts.

For users: docs/synchronisation.md#streaming
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.record.options import PARTS, KeyRules, Options
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.how.strategy import AgreementInputs, Strategy, slices_of_each
from deepex.sync.synced_slice import SyncedSlice, cut
from deepex.sync.total import Total
from deepex.sync.when.rule import Situation


@final
class PartsInTurn(Agreement):
    """`parts` near-equal contiguous parts. Several replicas of a rank need a slice each; a lone one lies in the arena.

    A request to stop lies in the first part, so it is heard when that part's turn comes.
    """

    since_epoch = True

    def __init__(self, synced: SyncedSlice, total: Total, *, replicas_per_rank: int, parts: int) -> None:
        super().__init__(synced)
        count = self._agreed.numel()
        self._all, self._total = slice(0, count), total
        self._parts = cut(count, parts)
        self._totals = [total.part(part) for part in self._parts]
        self._states = [torch.empty_like(self._agreed) for _ in range(replicas_per_rank)] if replicas_per_rank > 1 else []
        self._stop_flag = torch.zeros((), dtype=self._agreed.dtype, device=self._agreed.device)
        self._now, self._sum, self._apart = self._all, total, False

    @override
    def start(self) -> None:
        for state in self._states:
            state.copy_(self._agreed)
        self._apart = False

    @override
    def resume(self) -> None:
        self._apart = True

    @override
    def prepare(self, number: int, *, all_parts: bool) -> None:
        turn = number % len(self._parts)
        self._now, self._sum = (self._all, self._total) if all_parts else (self._parts[turn], self._totals[turn])
        self._sum.clear()

    @override
    def begin(self, index: int) -> None:
        if self._states:
            self._agreed.copy_(self._states[index])

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._sum.add(self._agreed[self._now], share)
        if self._states:
            self._states[index].copy_(self._agreed)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        holds_stop_flag, part = self.synced.holds_stop_flag(self._now), self._agreed[self._now]
        if holds_stop_flag:
            self._sum.ask(self.synced.request - self._now.start, request)
        self._sum.reach(comm)
        self._sum.into(part)
        if holds_stop_flag:
            self._stop_flag.copy_(self._agreed[self.synced.request])
        for state in self._states:
            state[self._now].copy_(part)
        self._apart = self._now is not self._all
        if not self._apart:
            self.on_mean(self._agreed)

    @property
    @override
    def nbytes(self) -> int:
        return self._totals[0].buffer.nbytes

    @override
    def state(self) -> KeptState:
        return KeptState(own={"weights": self._states or [self._agreed]})

    @override
    def kept(self) -> KeptState:
        return self.state() if self._apart else KeptState()


@dataclass(frozen=True, kw_only=True)
class StreamingOptions(Options):
    """`parts`: into so many the weights are cut."""

    parts: int = 4

    rules: ClassVar[KeyRules] = {"parts": PARTS}


@final
class Streaming(Strategy):
    """Small syncs, often."""

    name = "streaming"

    @override
    def situation(self, config: Any) -> Situation:
        return Situation(age=config.parts)

    @override
    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        return slices_of_each(per_rank)

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        total = inputs.make(inputs.synced.agreed)
        return PartsInTurn(inputs.synced, total, replicas_per_rank=inputs.per_rank, parts=config.parts)


KIND: Final = Streaming
