"""`background`, syncs that are hidden: the collective of one period runs while the next computes.

Its correction is applied when it has come.

At a sync each replica says where its weights may be when the mean comes, as far as its momentum v tells: for a delay of d steps,
x' = x − ½ rate · (β + β² + … + βᵈ) · v. The sum over all of them is begun, and training goes on at once. A period later, or after
`delay` steps, the mean m is taken over, x ← x + pull · (m − x'), which waits if it is not there yet. So a replica's weights are the
mean as of a few steps ago and its own steps since (DaSGD: Zhou et al. 2020; Overlap-Local-SGD: Wang, Liang & Joshi 2020; the
paper's "background synchronisation"). The sync at the end of an epoch makes all equal: the weights are waited for, because
validation needs them; momentum, where it is averaged, is on its way meanwhile, and taken over when the next epoch begins.

What learning pays for is the delay: until a mean has come, replicas drift further apart. Two things make that small.
- Each sync takes one of `parts` parts of the weights, in turn (as Streaming DiLoCo: Douillard et al. 2025). With the same bytes per
  step a part is on its way for that much shorter.
- With a momentum of 0.9, most of the drift within a few steps is motion that replicas had before. It is part of where they are
  heading, so the mean takes it away, and what is left is due to the gradients since. They bend the path, so half of the way is
  taken for granted: with all of it some networks are better still, but in the steep valleys of a CVAE replicas were thrown about.
Validation errors of a convolutional network on Fashion-MNIST, 2 to 4 replicas, each weight sent every 16 steps, three epochs, less
those of the same seeds with syncs that wait: +0.20 points (0.10 to 0.29, 24 pairs) without looking ahead, +0.06 (-0.01 to 0.14, 12
pairs) with half of the way, -0.03 (-0.11 to 0.06, 24 pairs) with all. All weights at once, and 6 of 11 steps late: +0.6.
Where delays are longer, replicas' own steps may have undone the difference by then, and a pull below 1 helps.

What travels so are the weights. Batch-norm statistics and momentum are each replica's own until the end of the epoch: a variance
that is corrected could fall below zero, and momentum of one period ago is not of use today.
A request to stop lies in the first part, and is heard with the mean in which it travelled.

For users: docs/synchronisation.md#background
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from deepex.comm.background import Background, Pending
from deepex.comm.base import Communicator, own_zeros
from deepex.record.options import PARTS, SHARE, KeyRules, Options
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.how.strategy import AgreementInputs, Strategy, slices_of_each
from deepex.sync.synced_slice import SyncedSlice, cut
from deepex.sync.total import Total, make_total
from deepex.sync.when.rule import Situation

_TRUST: Final = 0.5  # in momentum alone, between a sync and its mean
_LATE: Final = 3  # periods: by so much is a mean older, as drift goes


@final
class Delayed(Agreement):
    """The sum and a part more, for the mean, and for each replica what it told; a rank that has several keeps a slice of each.

    Who owns what: from `reach` until it has been waited for, the worker owns the buffer of the part that is under way. The mean and
    what was told are the caller's. The mean is of use (`_arrived`) from then until the next `reach`, in the part that came.
    After the sync at the end of an epoch, what is under way is momentum (`_rest`), and the next stretch begins with it.
    """

    since_epoch = True

    def __init__(
        self, synced: SyncedSlice, total: Total, *, replicas_per_rank: int, worker: Background, pull: float, delay: int, parts: int
    ) -> None:
        super().__init__(synced)
        self._total, self._worker, self._pull, self._delay = total, worker, pull, delay
        model, count = max(synced.buffers.stop, synced.weights.stop), self._agreed.numel()
        self._all, self._model, self._rest = slice(0, count), slice(0, model), slice(model, count)
        self._parts = cut(model, parts)  # in the background
        self._totals = [total.part(part) for part in self._parts]
        longest = max(part.stop - part.start for part in self._parts)
        self._mean = self._agreed.new_zeros(longest)
        self._sent = [torch.zeros_like(self._mean) for _ in range(replicas_per_rank)]
        self._states = [torch.empty_like(self._agreed) for _ in range(replicas_per_rank)] if replicas_per_rank > 1 else []
        self._pending: Pending | None = None
        self._way = (total, self._all)
        self.prepare(0, all_parts=True)
        self._arrived = self._apart = False
        self._ahead = 0.0
        self._stop_flag = torch.zeros((), dtype=self._agreed.dtype, device=self._agreed.device)

    @override
    def start(self) -> None:
        for state in self._states:
            state.copy_(self._agreed)
        self._arrived = self._apart = False

    @override
    def resume(self) -> None:
        """The checkpoint was taken right after a sync, and the mean was waited for."""
        self._arrived = self._apart = True

    @override
    def watch(self, steps: int) -> None:
        """Take it that the next stretch is as long as this one."""
        momentum_ahead = self.synced.momentum_ahead
        self._ahead = _TRUST * momentum_ahead.ahead(self._late(steps)) if momentum_ahead else 0.0

    @override
    def prepare(self, number: int, *, all_parts: bool) -> None:
        if self._way[1] is self._rest:
            self.settle()
        turn = number % len(self._parts)
        self._sum: Total = self._total if all_parts else self._totals[turn]
        self._now: slice = self._all if all_parts else self._parts[turn]
        self._before = self._parts[turn - 1]
        self._begun, self._all_parts = False, all_parts

    @override
    def begin(self, index: int) -> None:
        if self._states:
            self._agreed.copy_(self._states[index])

    @override
    def pauses(self, start: int, stop: int) -> int:
        return start + self._late(stop - start)

    def _late(self, steps: int) -> int:
        """How many steps of a stretch are done when the mean is taken over."""
        return min(self._delay, steps) or steps

    @override
    def pause(self, index: int) -> None:
        self.settle()
        if self._arrived:
            weights, own = self._weights_of(self._before)
            self._agreed[weights].add_(self._mean[own], alpha=self._pull).sub_(self._sent[index][own], alpha=self._pull)

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        if not self._begun:  # not in `prepare`: the last sum may still be under way then, in the same memory
            self._sum.clear()
            self._begun = True
        if self._all_parts:
            self._sum.add(self._agreed, share)
            return
        part = self._agreed[self._now]
        sent = self._sent[index][: len(part)].copy_(part)
        if self.synced.momentum_ahead:
            weights, own = self._weights_of(self._now)
            first = self.synced.weights.start
            velocity = self.synced.momentum_ahead.velocity[weights.start - first : weights.stop - first]
            sent[own].sub_(velocity, alpha=rate * self._ahead)
        self._sum.add(sent, share)
        if self._states:
            self._states[index].copy_(self._agreed)

    def _weights_of(self, part: slice) -> tuple[slice, slice]:
        """Where the weights of a part lie: among all, and in the part."""
        weights = self.synced.weights
        start = max(weights.start, part.start)
        stop = max(start, min(weights.stop, part.stop))
        return slice(start, stop), slice(start - part.start, stop - part.start)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        if self.synced.holds_stop_flag(self._now):
            self._sum.ask(self.synced.request - self._now.start, request)
        self._sum.check()
        self._arrived = False
        self._apart = not self._all_parts
        if self._apart:
            self._set_out(self._sum, self._now)
            return
        model = self._total.part(self._model)
        comm.sum(model.buffer)
        model.into(self._agreed[self._model])
        self._stop_flag.copy_(self._agreed[self.synced.request])
        self.on_mean(self._agreed)
        if self._rest.stop > self._rest.start:
            self._set_out(self._total.part(self._rest), self._rest)
        else:
            self.start()

    def _set_out(self, total: Total, part: slice) -> None:
        self._way, self._pending = (total, part), self._worker.sum(total.buffer)

    @override
    def settle(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        total, part = self._way
        if part is self._rest:
            total.into(self._agreed[part])
            self.start()
            return
        self._arrived = True
        total.into(self._mean[: part.stop - part.start])
        if self.synced.holds_stop_flag(part):
            self._stop_flag.copy_(self._mean[self.synced.request - part.start])

    @override
    def close(self) -> None:
        self._worker.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._totals[0].buffer.nbytes

    @override
    def state(self) -> KeptState:
        return KeptState(shared={"mean": self._mean}, own={"weights": self._states or [self._agreed], "sent": self._sent})

    @override
    def kept(self) -> KeptState:
        return self.state() if self._apart else KeptState()


@dataclass(frozen=True, kw_only=True)
class BackgroundOptions(Options):
    """`parts`: into so many the weights are cut. `delay`: a mean is taken over so many steps later, or a period if 0.

    `pull`: how much of the difference counts.
    """

    pull: float = 1.0
    delay: int = 0
    parts: int = 4

    rules: ClassVar[KeyRules] = {
        "pull": SHARE,
        "delay": (lambda value: value >= 0, "at least 0 (0: a period)"),
        "parts": PARTS,
    }


@final
class InBackground(Strategy):
    """Syncs that are hidden."""

    name = "background"

    @override
    def situation(self, config: Any) -> Situation:
        return Situation(age=config.parts + _LATE, hides=True)

    @override
    def overlaps(self, config: Any) -> bool:
        return True

    @override
    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        return slices_of_each(per_rank)

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        total = make_total(inputs.synced.agreed, deterministic=inputs.fixed, zeros=own_zeros)  # not memory that ranks share
        options = {"pull": config.pull, "delay": config.delay, "parts": config.parts}
        return Delayed(inputs.synced, total, replicas_per_rank=inputs.per_rank, worker=Background(inputs.comm), **options)


KIND: Final = InBackground
