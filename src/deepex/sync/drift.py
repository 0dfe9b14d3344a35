"""How far replicas are apart when they meet: the norm of a replica's weights minus the mean's, for each group of layers.

    drift = Drift(region, spans, replicas_per_rank=8)
    drift.note(index)            # a replica's turn is over
    drift.on_mean(mean)              # and all have met
    drift.read()                 # mean squares over the syncs of the epoch
    drift.reset()                # and the next one begins

Of matrices, kernels among them: biases and the gains of norms are few and may move fast (with LARS, which does not hold them back,
by 13 % where matrices moved by 1 %), and say little about how far apart networks are. A network without matrices is measured whole.

Measured on a sample of the weights, some of each group, that is copied before the sync and compared after: a read of a few thousand
numbers instead of the whole arena, no collective, and nothing reaches the host before it is read. A norm is known to a few
percent so, and exactly where a group has no more weights than its sample.
"""

import math
from collections.abc import Sequence
from typing import Final, final

import torch

from deepex.sync.synced_slice import SyncedSlice

_SAMPLE: Final = 8192  # of all weights
_LEAST: Final = 128  # of a group
_MOST_GROUPS: Final = 24

Span = tuple[str, int, int]  # name of a tensor, where it lies among the weights, how many numbers


@final
class Drift:
    """Sums up drift over the syncs of an epoch."""

    def __init__(self, synced: SyncedSlice, spans: Sequence[Span], *, replicas_per_rank: int) -> None:
        groups = group_spans(spans)
        self.names = list(groups)
        places, numbers, scales = [], [], []
        whole = sum(count for _, _, count in spans)
        for number, parts in enumerate(groups.values()):
            count = sum(size for _, size in parts)
            some = min(count, max(_LEAST, _SAMPLE * count // whole))
            places.append(_spread(parts, count, some) + synced.weights.start)
            numbers.append(torch.full((some,), number))
            scales.append(torch.full((some,), count / some))
        device = synced.agreed.device
        self._agreed = synced.agreed
        self._places, self._numbers, self._scales = (torch.cat(part).to(device) for part in (places, numbers, scales))
        self._local = synced.agreed.new_zeros((replicas_per_rank, len(self._places)))
        self._last: torch.Tensor | None = None
        self._sums = torch.zeros((3, len(groups)), dtype=torch.float64, device=device)
        self.syncs = 0  # that were summed up
        self._missed: list[int] = []

    def note(self, index: int) -> None:
        """Copy the sample of the replica on the arena."""
        torch.index_select(self._agreed, 0, self._places, out=self._local[index])

    def miss(self, index: int) -> None:
        """Count a replica that is left out as if it were where the others meet."""
        self._missed.append(index)

    def on_mean(self, mean: torch.Tensor) -> None:
        """Compare what was noted with the mean."""
        centre = mean.index_select(0, self._places)
        while self._missed:
            self._local[self._missed.pop()] = centre
        before = centre if self._last is None else self._last
        squares = [(self._local - centre).square().mean(0), (centre - before).square(), centre.square()]
        self._sums.index_add_(1, self._numbers, (torch.stack(squares) * self._scales).double())
        self._last = centre
        self.syncs += 1

    def read(self) -> list[float]:
        """Mean squares over the syncs so far, three for each group; zeros if there was none. Waits for the device."""
        found = (self._sums / max(self.syncs, 1)).T.reshape(-1).tolist()
        return [float(value) for value in found]

    def reset(self) -> None:
        """Forget the syncs so far."""
        self._sums.zero_()
        self.syncs = 0

    def restore(self, syncs: int, values: Sequence[float]) -> None:
        """Go on from what `read` gave, averaged over the ranks, after so many syncs."""
        self._sums.copy_(torch.tensor(values, dtype=torch.float64).reshape(-1, 3).T * syncs)
        self.syncs = syncs

    def shares(self, rows: torch.Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Drift, and movement of the mean since the sync before, as shares of the mean's norm: of all groups (`all`) and of each.

        `rows` has what each rank read.
        """
        squares = rows.mean(0).reshape(-1, 3).tolist()
        whole = [sum(column) for column in zip(*squares, strict=True)]
        names = ("all", *self.names)
        drift, moved = ([_share(row[k], row[2]) for row in (whole, *squares)] for k in (0, 1))
        return dict(zip(names, drift, strict=True)), dict(zip(names, moved, strict=True))


def _share(square: float, whole: float) -> float:
    return math.sqrt(square / whole) if whole > 0 else 0.0


def group_spans(spans: Sequence[Span]) -> dict[str, list[tuple[int, int]]]:
    """Tensors by the first words of their names: as many words as give at most so many groups."""
    deepest = max(name.count(".") for name, _, _ in spans)
    chosen: dict[str, list[tuple[int, int]]] = {}
    for words in range(1, deepest + 2):
        found: dict[str, list[tuple[int, int]]] = {}
        for name, offset, count in spans:
            found.setdefault(".".join(name.split(".")[:words]), []).append((offset, count))
        if chosen and len(found) > _MOST_GROUPS:
            break
        chosen = found
    return chosen


def _spread(parts: list[tuple[int, int]], count: int, some: int) -> torch.Tensor:
    """`some` of the `count` places of these parts, evenly."""
    chosen = torch.arange(some, dtype=torch.float64).mul_(count / some).long()
    ends = torch.tensor([size for _, size in parts]).cumsum(0)
    part = torch.searchsorted(ends, chosen, right=True)
    offsets = torch.tensor([offset for offset, _ in parts])
    return offsets[part] + chosen - (ends - torch.tensor([size for _, size in parts]))[part]
