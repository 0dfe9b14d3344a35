"""How replicas agree: one contiguous slice of the arena is brought to its weighted mean over all replicas, in one collective.

    agreement.prepare(number, whole=False)      # a stretch begins
    agreement.begin(0)                # each replica of the rank starts from where it is
    …steps…
    agreement.add(0, share=0.125)     # share: this replica's part of all samples seen
    agreement.reach(comm, request=0.0, rate=0.1)    # one collective

Here are the two ways of the plain mean (local SGD: Stich 2019; with gradients for weights, synchronous SGD), after which all
replicas are equal:
- `InPlace`: one replica per rank. The collective works on the arena itself.
- `SharedArenaMean`: several replicas take turns on the arena. Two more slices, however many replicas: what was last agreed, and
  the sum so far.
A replica that has gone astray (`lose`) is left out of these: it adds nothing but its share, the sum of the others is divided by
what is left of one, and it goes on from there like the others.
Other agreements wrap one of these (outer.py) or keep a state for each replica (elastic.py, streaming.py, delayed.py).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import Total

Met = Callable[[torch.Tensor], None]
_LONG: Final = 64  # steps, beside which it does not count that a GPU is waited for


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """Tensors beside the arena: `shared` are the same on every rank, `own` are of each replica of this rank."""

    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Agreement(ABC):
    """Brings a region of the arena to what its replicas agree on.

    `since_epoch`: shares count the samples since the beginning of the epoch, because replicas differ between syncs.
    `met` hears of each mean, as a tensor like the region, before anything else is made of it.
    """

    since_epoch = False

    def __init__(self, synced: SyncedSlice) -> None:
        self.synced = synced
        self.met: Met = lambda _mean: None
        self._agreed = synced.agreed
        self._told = synced.agreed[synced.request]  # or what else an agreement keeps the last answer in

    @property
    def leaves_out(self) -> bool:
        """Whether `lose` may be called in this stretch."""
        return False

    def watch(self, steps: int) -> None:
        """Hear, on every rank the same, of how many steps the turns of the stretch that begins are, at least."""
        return

    def lose(self) -> None:
        """Leave out the replica on the arena, which has gone astray, when it is added next."""
        self._agreed.zero_()
        self._agreed[self.synced.lost] = 1.0

    def start(self) -> None:
        """Take what the region holds now, on every rank the same, as what was last agreed."""
        return

    def resume(self) -> None:
        """Go on from a checkpoint that kept something: the region and the state have been read."""
        self.start()

    def prepare(self, number: int, *, whole: bool) -> None:
        """Begin the stretch before sync `number` of the epoch; after a `whole` sync all replicas are equal."""
        return

    @abstractmethod
    def begin(self, index: int) -> None:
        """Start the turn of this rank's replica number `index`."""

    def pauses(self, start: int, stop: int) -> int | None:
        """The step of a stretch, after its first and up to `stop`, at which each replica's turn is interrupted by `pause`."""
        return None

    def pause(self, index: int) -> None:
        """Do what there is to be done within a turn."""
        return

    def expect(self, share: float) -> None:
        """Hear, before the steps of a turn, with which weight the replica will be contributed."""
        return

    @abstractmethod
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        """Contribute the replica on the arena with weight `share`; `rate` is its last step's."""

    @abstractmethod
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        """Agree with the other ranks; `requests` is above zero then if some rank's `request` was. `rate` is the step's last."""

    def _sum_asking(self, comm: Communicator, values: torch.Tensor, share: float, request: float) -> None:
        """Sum those values of the region among which the request travels, weighted by `share`: of none, the request is all."""
        if share == 0:
            values.zero_()
            share = 1.0
        self._agreed[self.synced.request : self.synced.request + 1].fill_(request)
        comm.sum(values, share)

    def settle(self) -> None:
        """Bring the state up to date, so that it can be kept. Collective."""
        return

    def close(self) -> None:
        """Release what is held beside memory. Not collective."""
        return

    @property
    def nbytes(self) -> int:
        """The size of the buffer that one sync sums."""
        return self._agreed.nbytes

    @property
    def requests(self) -> torch.Tensor:
        """Above zero if some rank asked to stop at the last sync; on the device."""
        return self._told

    def state(self) -> KeptState:
        """What there is beside the arena, by name: a checkpoint is read into it."""
        return KeptState()

    def kept(self) -> KeptState:
        """What of it a checkpoint must keep now."""
        return self.state()


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
        self.met(self._agreed)


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
        self.met(self._agreed)
        self.start()

    @property
    @override
    def nbytes(self) -> int:
        return self._total.buffer.nbytes
