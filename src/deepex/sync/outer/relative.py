"""Steps that are a share of each matrix's norm: what `trust` and `muon` have in common."""

import itertools
import math
from abc import abstractmethod
from collections import defaultdict

import torch
from typing_extensions import override

from deepex.sync.outer.outer_step import OuterStep
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice


class Relative(OuterStep):
    """Each matrix moves by `rate` of the norm it began with, along a direction told by its velocity; the rest as momentum has it.

    Steps that followed the norm of now would let it grow without end: random steps of 5 % make it half as large again in 300, and
    networks without normalisation fell apart so. Matrices of one shape, or its transpose, go together.
    """

    def __init__(self, synced: SyncedSlice, *, rate: float, momentum: float, peak: float) -> None:
        super().__init__(synced, rate=rate, momentum=momentum, peak=peak)
        shapes: dict[tuple[int, ...], list[MatrixSlot]] = defaultdict(list)
        for place in synced.matrices:
            shapes[tuple(sorted((place.rows, place.columns)))].append(place)
        self._groups = list(shapes.values())
        self._norms = self.velocity.new_zeros(sum(map(len, self._groups)))
        self._share = self.velocity.new_zeros(1)  # of a norm that a matrix moves by
        self._graph: torch.cuda.CUDAGraph | None = None

    @override
    def start(self, weights: torch.Tensor) -> None:
        for k, place in enumerate(itertools.chain(*self._groups)):
            self._norms[k] = float(place.of(weights).norm()) or math.sqrt(place.rows / 3)  # zeros: as torch would draw them

    @override
    def state(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity, "norms": self._norms}

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self._share.fill_(self.rate * rate / self.peak)
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch(last, change)
        if last.is_cuda:  # hundreds of short kernels; libraries have now had the first time that they need before a capture
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._launch(last, change)

    def _launch(self, last: torch.Tensor, change: torch.Tensor) -> None:
        self.velocity.mul_(self.momentum).add_(change)
        change.add_(self.velocity, alpha=self.momentum)  # Nesterov's look ahead
        lengths = (self._share * self._norms).split([len(places) for places in self._groups])
        for places, length in zip(self._groups, lengths, strict=True):
            along = self._direction(torch.stack([place.of(change) for place in places]))
            along *= length[:, None, None] / norms(along).clamp(min=1e-30)
            for place, matrix in zip(places, along, strict=True):
                place.of(change).copy_(matrix)
        last.sub_(change)

    @abstractmethod
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        """Where matrices of one shape go."""


def norms(matrices: torch.Tensor) -> torch.Tensor:
    """The norm of each matrix, to multiply or divide them by."""
    norms: torch.Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    return norms
