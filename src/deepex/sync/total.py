"""Sums over a rank's replicas, one turn after another, and then over the ranks.

    total.add(values, share=0.125)      # for each replica of this rank
    total.ask(0, request)
    total.reach(comm)                   # one collective, on `total.buffer`
    total.into(out)

`FloatTotal` adds as the values are. `FixedTotal` adds in 64-bit fixed point, where the order of addition cannot matter, so that the
bits are the same on any number of ranks: `deterministic`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator, Zeros
from deepex.errors import FailureError

MakeTotal = Callable[[torch.Tensor], "Total"]

_FRACTION_BITS: Final = 40
_LIMIT: Final = 2.0 ** (62 - _FRACTION_BITS)
_CHUNK: Final = 1 << 20


class Total(ABC):
    """The weighted sum of what was added since the last `clear`; `buffer` is what a collective sums."""

    buffer: torch.Tensor

    @abstractmethod
    def add(self, values: torch.Tensor, share: float) -> None:
        """Add `share` · values; of a share of zero nothing comes, whatever the values are."""

    @abstractmethod
    def ask(self, position: int, request: float) -> None:
        """Put a number of this rank's own at `position`, after the last `add`."""

    @abstractmethod
    def check(self) -> None:
        """Raise if a value was added that the sum cannot hold. May wait for a GPU: once per sync, not in every turn."""

    @abstractmethod
    def into(self, out: torch.Tensor) -> None:
        """Write the sum to `out`."""

    @abstractmethod
    def clear(self) -> None:
        """Begin anew."""

    @abstractmethod
    def part(self, part: slice) -> "Total":
        """A sum of parts alone, in the same memory; the two are not used at the same time."""

    def reach(self, comm: Communicator) -> None:
        """Sum over the ranks."""
        self.check()
        comm.sum(self.buffer)


@final
class FloatTotal(Total):
    """The sum in the values' own type."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._empty = True

    @override
    def add(self, values: torch.Tensor, share: float) -> None:
        if self._empty:
            torch.mul(values, share, out=self.buffer) if share else self.buffer.zero_()
        elif share:
            self.buffer.add_(values, alpha=share)
        self._empty = False

    @override
    def ask(self, position: int, request: float) -> None:
        self.buffer[position : position + 1].fill_(request)  # assigning a number to an element would make the device wait

    @override
    def check(self) -> None:
        return

    @override
    def into(self, out: torch.Tensor) -> None:
        out.copy_(self.buffer)

    @override
    def clear(self) -> None:
        self._empty = True

    @override
    def part(self, part: slice) -> "FloatTotal":
        return FloatTotal(self.buffer[part])


@final
class FixedTotal(Total):
    """Sums of integers, value · 2^40: associative, hence the same bits in any order.

    Values must stay below 2^22 in size; what is smaller than 2^-41 rounds to zero, which float32 weights do not feel.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._largest = torch.zeros((), dtype=torch.float64, device=buffer.device)

    @override
    def add(self, values: torch.Tensor, share: float) -> None:
        if share == 0:
            return
        torch.maximum(self._largest, values.abs().amax().double(), out=self._largest)  # NaN stays
        for some, total in zip(values.split(_CHUNK), self.buffer.split(_CHUNK), strict=True):
            total.add_(some.to(torch.float64, copy=True).mul_(share * 2.0**_FRACTION_BITS).round_().to(torch.int64))

    @override
    def ask(self, position: int, request: float) -> None:
        self.buffer[position : position + 1].fill_(round(request * 2.0**_FRACTION_BITS))

    @override
    def check(self) -> None:
        if not bool(self._largest < _LIMIT):
            raise FailureError(
                f"a weight is not a number or larger than {_LIMIT:.0f}, which deterministic sums cannot hold: "
                "lower optim.rate, or set deterministic=false"
            )

    @override
    def into(self, out: torch.Tensor) -> None:
        for some, total in zip(out.split(_CHUNK), self.buffer.split(_CHUNK), strict=True):
            some.copy_(total.double().mul_(2.0**-_FRACTION_BITS))

    @override
    def clear(self) -> None:
        self.buffer.zero_()
        self._largest.zero_()

    @override
    def part(self, part: slice) -> "FixedTotal":
        return FixedTotal(self.buffer[part])


def make_total(like: torch.Tensor, *, deterministic: bool, zeros: Zeros) -> Total:
    """A sum of tensors like this one, in memory that `zeros` makes."""
    buffer = zeros(like.numel(), torch.int64 if deterministic else like.dtype, like.device)
    return FixedTotal(buffer) if deterministic else FloatTotal(buffer)
