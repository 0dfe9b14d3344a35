"""The part of the arena on which replicas agree, and what lies where in it."""

from dataclasses import dataclass

import torch

from deepex.arena.optimiser.base import MomentumAhead


@dataclass(frozen=True)
class MatrixSlot:
    """Where a weight of two or more dimensions lies, as a matrix with a row for each output, in the order of memory."""

    offset: int
    rows: int
    columns: int

    def of(self, weights: torch.Tensor) -> torch.Tensor:
        """The matrix among `weights`, a view; a tall one lies on its side."""
        matrix = weights[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)
        return matrix if self.rows <= self.columns else matrix.mT


@dataclass(frozen=True, kw_only=True)
class SyncedSlice:
    """One contiguous slice, `agreed`, that a sync brings to the mean over all replicas.

    `buffers` and `weights` are its parts with the batch-norm statistics and with the weights (none where gradients are agreed on).
    `own` is what a replica's turn must start from: all of it, or the buffers alone where every step replaces the rest. `request` is
    the position of one number that is above zero after a sync if some rank asked to stop: ranks tell each other within the same
    collective. So does `lost`, where there is one, with the share of replicas that are left out. `matrices` are the weights that
    are no biases and not of normalisation. `momentum_ahead` is of weights whose momentum stays with them after a sync. `slots` tell
    where each gradient begins and how many numbers it has, if somebody tells as soon as it is there.
    """

    agreed: torch.Tensor
    buffers: slice
    weights: slice
    own: slice
    request: int
    lost: int | None = None
    matrices: tuple[MatrixSlot, ...] = ()
    momentum_ahead: MomentumAhead | None = None
    slots: tuple[tuple[int, int], ...] = ()

    @property
    def moved(self) -> list[slice]:
        """All but the buffers: what an average of *changes* is good for. A variance that is corrected so could fall below zero."""
        parts = slice(0, self.buffers.start), slice(self.buffers.stop, self.agreed.numel())
        return [part for part in parts if part.stop > part.start]

    def holds_stop_flag(self, part: slice) -> bool:
        """Whether the request travels in this part."""
        return bool(part.start <= self.request < part.stop)


def cut(count: int, parts: int) -> list[slice]:
    """Near-equal contiguous parts of so many numbers."""
    return [slice(k * count // parts, (k + 1) * count // parts) for k in range(parts)]
