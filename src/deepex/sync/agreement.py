"""How replicas agree: one contiguous slice of the arena is brought to its weighted mean over all replicas, in one collective.

    agreement.prepare(number, all_parts=False)  # a stretch begins
    agreement.begin(0)                # each replica of the rank starts from where it is
    …steps…
    agreement.add(0, share=0.125)     # share: this replica's part of all samples seen
    agreement.reach(comm, request=0.0, rate=0.1)    # one collective

The plain mean is in mean.py. Other agreements wrap it (outer/) or keep a state for each replica (how/).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepex.comm.base import Communicator
from deepex.sync.synced_slice import SyncedSlice

OnMean = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """Tensors beside the arena: `shared` are the same on every rank, `own` are of each replica of this rank."""

    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Agreement(ABC):
    """Brings a region of the arena to what its replicas agree on.

    `since_epoch`: shares count the samples since the beginning of the epoch, because replicas differ between syncs.
    `hears`: is told of each gradient as soon as it is in the arena, if there is one who wants to.
    `on_mean` hears of each mean, as a tensor like the region, before anything else is made of it.
    """

    since_epoch = False
    hears: Callable[[int], None] | None = None

    def __init__(self, synced: SyncedSlice) -> None:
        self.synced = synced
        self.on_mean: OnMean = lambda _mean: None
        self._agreed = synced.agreed
        self._stop_flag = synced.agreed[synced.request]  # or what else an agreement keeps the last answer in

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

    def prepare(self, number: int, *, all_parts: bool) -> None:
        """Begin the stretch before sync `number` of the epoch; after one of `all_parts` all replicas are equal."""
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
        return self._stop_flag

    def state(self) -> KeptState:
        """What there is beside the arena, by name: a checkpoint is read into it."""
        return KeptState()

    def kept(self) -> KeptState:
        """What of it a checkpoint must keep now."""
        return self.state()
