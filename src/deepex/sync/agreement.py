"""How replicas agree: the weighted sum of one contiguous slice over all replicas of all ranks, in one collective.

    agreement.begin()                 # each replica of the rank starts from what was last agreed
    …steps…
    agreement.add(share=0.125)        # share: this replica's part of all samples seen since the last sync
    agreement.reach(comm, request)    # one collective; afterwards the slice holds the mean

Three ways, chosen by `make_agreement`:
- `InPlace`: one replica per rank. The collective works on the arena itself.
- `Accumulated`: several replicas take turns on the arena. Two more slices, however many replicas: what was last agreed, and the
  sum so far; at each sync they change roles.
- `FixedPoint`: `deterministic`. The sum is taken in 64-bit fixed point, where the order of addition cannot matter, so the bits are
  the same on any number of ranks.
"""

from abc import ABC, abstractmethod
from typing import Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator, Zeros
from deepex.errors import FailureError

_FRACTION_BITS: Final = 40
_LIMIT: Final = 2.0 ** (62 - _FRACTION_BITS)
_CHUNK: Final = 1 << 20


class Agreement(ABC):
    """Brings a slice of the arena to its weighted mean over all replicas.

    `agreed` is the slice; `own` the part of it that a replica's turn must start from (with gradients, that is the buffers alone,
    because every step replaces the gradients). `request` is the position in the slice of one number that is above zero afterwards
    if some rank asked to stop: so they tell each other within the same collective.
    """

    def __init__(self, agreed: torch.Tensor, *, own: torch.Tensor, request: int) -> None:
        self._agreed, self._own, self._request = agreed, own, request

    def start(self) -> None:
        """Take what the slice holds now, on every rank the same, as what was last agreed."""
        return

    @abstractmethod
    def begin(self) -> None:
        """Start a replica's turn from what was last agreed."""

    @abstractmethod
    def add(self, share: float) -> None:
        """Contribute the replica on the arena with weight `share`."""

    @abstractmethod
    def reach(self, comm: Communicator, request: float) -> None:
        """Sum over the ranks; then the slice holds the mean, and `requests` is above zero if some rank's `request` was."""

    def _ask(self, buffer: torch.Tensor, request: float) -> None:
        """Put this rank's request in its place; `fill_`, because assigning a number to an element makes the device wait."""
        buffer[self._request : self._request + 1].fill_(request)

    @property
    def nbytes(self) -> int:
        """The size of the buffer that one sync sums."""
        return self._agreed.nbytes

    @property
    def requests(self) -> torch.Tensor:
        """Above zero if some rank asked to stop at the last sync; on the device."""
        return self._agreed[self._request]


@final
class InPlace(Agreement):
    """One replica per rank: its arena is weighted and summed where it lies, in one go."""

    _share = 1.0

    @override
    def begin(self) -> None:
        return

    @override
    def add(self, share: float) -> None:
        self._share = share

    @override
    def reach(self, comm: Communicator, request: float) -> None:
        self._ask(self._agreed, request)
        comm.sum(self._agreed, self._share)


class _Turns(Agreement):
    """What the two ways with a sum of their own have in common: each turn after the first restores what was agreed."""

    _fresh = True

    def begin(self) -> None:
        if not self._fresh:
            self._own.copy_(self._base())
        self._fresh = False

    @abstractmethod
    def _base(self) -> torch.Tensor:
        """What was last agreed, for `own`."""


@final
class Accumulated(_Turns):
    """Several replicas per rank: `base` is what was agreed, `total` the sum of the turns so far."""

    def __init__(self, agreed: torch.Tensor, *, own: torch.Tensor, request: int, zeros: Zeros) -> None:
        super().__init__(agreed, own=own, request=request)
        self._offset = own.storage_offset() - agreed.storage_offset()
        self._last, self._total = (zeros(agreed.numel(), agreed.dtype, agreed.device) for _ in range(2))
        self._empty = True

    @override
    def start(self) -> None:
        self._last.copy_(self._agreed)
        self._empty = self._fresh = True

    @override
    def add(self, share: float) -> None:
        if self._empty:
            torch.mul(self._agreed, share, out=self._total) if share else self._total.zero_()
        elif share:
            self._total.add_(self._agreed, alpha=share)
        self._empty = False

    @override
    def reach(self, comm: Communicator, request: float) -> None:
        self._ask(self._total, request)
        comm.sum(self._total)
        self._last, self._total = self._total, self._last
        self._agreed.copy_(self._last)
        self._empty = self._fresh = True

    def _base(self) -> torch.Tensor:
        return self._last[self._offset : self._offset + self._own.numel()]


@final
class FixedPoint(_Turns):
    """Sums of integers, value · 2^40, on any number of replicas: associative, hence the same bits in any order.

    Values must stay below 2^22 in size; what is smaller than 2^-41 rounds to zero, which float32 weights do not feel.
    """

    def __init__(self, agreed: torch.Tensor, *, own: torch.Tensor, request: int, zeros: Zeros) -> None:
        super().__init__(agreed, own=own, request=request)
        self._last = torch.empty_like(own)
        self._total = zeros(agreed.numel(), torch.int64, agreed.device)
        self._largest = torch.zeros((), dtype=agreed.dtype, device=agreed.device)

    @override
    def start(self) -> None:
        self._last.copy_(self._own)
        self._total.zero_()
        self._largest.zero_()
        self._fresh = True

    @override
    def add(self, share: float) -> None:
        if share == 0:
            return
        torch.maximum(self._largest, self._agreed.abs().amax(), out=self._largest)  # NaN stays
        for values, total in zip(self._agreed.split(_CHUNK), self._total.split(_CHUNK), strict=True):
            total.add_(values.double().mul_(share).mul_(2.0**_FRACTION_BITS).round_().to(torch.int64))

    @override
    def reach(self, comm: Communicator, request: float) -> None:
        if not bool(self._largest < _LIMIT):  # waits for a GPU: once per sync, not in every turn
            raise FailureError(
                f"a weight is not a number or larger than {_LIMIT:.0f}, which deterministic sums cannot hold: "
                "lower optim.rate, or set deterministic=false"
            )
        self._ask(self._total, round(request * 2.0**_FRACTION_BITS))
        comm.sum(self._total)
        for values, total in zip(self._agreed.split(_CHUNK), self._total.split(_CHUNK), strict=True):
            values.copy_(total.double().mul_(2.0**-_FRACTION_BITS))
        self._last.copy_(self._own)
        self._total.zero_()
        self._largest.zero_()
        self._fresh = True

    @property
    @override
    def nbytes(self) -> int:
        return self._total.nbytes

    def _base(self) -> torch.Tensor:
        return self._last


def make_agreement(
    agreed: torch.Tensor, *, own: torch.Tensor, request: int, replicas_per_rank: int, deterministic: bool, zeros: Zeros
) -> Agreement:
    """Choose the way that fits; `deterministic` needs fixed point, several replicas per rank need an accumulator.

    `zeros` makes the memory of their sums: the communicator's.
    """
    if replicas_per_rank == 1 and not deterministic:
        return InPlace(agreed, own=own, request=request)
    kind = FixedPoint if deterministic else Accumulated
    return kind(agreed, own=own, request=request, zeros=zeros)
