"""An optimiser over syncs: the change that replicas agreed on is taken as a gradient, and a step of its own made along it.

    agreement = Outer(InPlace(region), Nesterov(weights, rate=0.7, momentum=0.9))

With z the weights last agreed, m the mean of the replicas' and d = z − m. Every rank computes the same step from the same numbers,
so nothing more is sent. Batch-norm statistics and the replicas' own momentum are the mean and no more. With period 1 and no inner
momentum, d is the mean gradient times the rate, so these are large-batch optimisers too, whose scale is taken *after* the average:
LARS in each replica divides by the norm of its own noisy gradient, which many replicas together do not have.

Those whose steps do not shrink with d (`adam`, `trust`, `muon`) follow the schedule of the learning rate by its share of the peak.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement, KeptState
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice

_ROUNDS: Final = 5
_QUINTIC: Final = (
    3.4445,
    -4.7750,
    2.0315,
)  # of Newton-Schulz: singular values from 0.001 to 1 come to about 0.7 to 1.2 in five rounds


class OuterStep(ABC):
    """Moves the agreed weights `last` along a change, in place; `velocity` and what else it remembers is the same on every rank."""

    def __init__(self, weights: torch.Tensor, *, rate: float, momentum: float, peak: float) -> None:
        self.rate, self.momentum, self.peak = rate, momentum, peak
        self.velocity = torch.zeros_like(weights)

    def start(self, weights: torch.Tensor) -> None:
        """Hear what the run begins with; not if it goes on from a state."""
        return

    @abstractmethod
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        """Make the step, on the same two tensors each time; `change` may be overwritten.

        `rate` is that of the replicas at the sync, at most `peak`.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep."""
        return {"velocity": self.velocity}


@final
class SlowMo(OuterStep):
    """u ← momentum · u + d / γ, z ← z − rate · γ · u, with γ the replicas' rate (Wang et al. 2020)."""

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self.velocity.mul_(self.momentum).add_(change, alpha=1 / rate)
        last.sub_(self.velocity, alpha=self.rate * rate)


@final
class Nesterov(OuterStep):
    """u ← momentum · u + d, z ← z − rate · (d + momentum · u): DiLoCo (Douillard et al. 2023)."""

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self.velocity.mul_(self.momentum).add_(change)
        last.sub_(change, alpha=self.rate).sub_(self.velocity, alpha=self.rate * self.momentum)


@final
class Adam(OuterStep):
    """Adam on the changes (FedAdam: Reddi et al. 2021), with the usual 0.99 for the squares, and `momentum`."""

    _SQUARES: Final = 0.99
    _LEAST: Final = 1e-8

    def __init__(self, weights: torch.Tensor, *, rate: float, momentum: float, peak: float) -> None:
        super().__init__(weights, rate=rate, momentum=momentum, peak=peak)
        self._squares, self._count = torch.zeros_like(weights), torch.zeros(1, dtype=weights.dtype)

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self._count += 1
        number = int(self._count)  # on the host: nobody waits
        self.velocity.lerp_(change, 1 - self.momentum)
        self._squares.mul_(self._SQUARES).addcmul_(change, change, value=1 - self._SQUARES)
        size = (self._squares / (1 - self._SQUARES**number)).sqrt_().add_(self._LEAST)
        last.addcdiv_(self.velocity, size, value=-self.rate * rate / self.peak / (1 - self.momentum**number))

    @override
    def state(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity, "squares": self._squares, "count": self._count}


class _Relative(OuterStep):
    """Each matrix moves by `rate` of the norm it began with, along a direction told by its velocity; the rest as momentum has it.

    Steps that followed the norm of now would let it grow without end: random steps of 5 % make it half as large again in 300, and
    networks without normalisation fell apart so. Matrices of one shape, or its transpose, go together.
    """

    def __init__(self, weights: torch.Tensor, *, rate: float, momentum: float, peak: float, matrices: Sequence[MatrixSlot]) -> None:
        super().__init__(weights, rate=rate, momentum=momentum, peak=peak)
        shapes: dict[tuple[int, ...], list[MatrixSlot]] = defaultdict(list)
        for place in matrices:
            shapes[tuple(sorted((place.rows, place.columns)))].append(place)
        self._groups = list(shapes.values())
        self._norms = weights.new_zeros(sum(map(len, self._groups)))
        self._share = weights.new_zeros(1)  # of a norm that a matrix moves by
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
            along *= length[:, None, None] / _norms(along).clamp(min=1e-30)
            for place, matrix in zip(places, along, strict=True):
                place.of(change).copy_(matrix)
        last.sub_(change)

    @abstractmethod
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        """Where matrices of one shape go."""


def _norms(matrices: torch.Tensor) -> torch.Tensor:
    """The norm of each, to multiply or divide them by."""
    norms: torch.Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    return norms


@final
class Trust(_Relative):
    """Trust ratios on the agreed change, of each matrix (after LARS and LAMB: You et al. 2017, 2020)."""

    @override
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        return changes


@final
class Muon(_Relative):
    """The direction is the nearest matrix with orthonormal rows or columns.

    Muon: Jordan et al. 2024; over syncs: Thérien et al. 2025, MuLoCo.
    """

    @override
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        return orthogonal(changes)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the same singular vectors, and singular values near 1, by Newton-Schulz; in bf16 on a GPU."""
    x = (matrices / _norms(matrices).clamp(min=1e-30)).to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def muon_flops(shapes: Iterable[Sequence[int]]) -> float:
    """The operations of one step by Muon on weights of these shapes."""
    total = 0.0
    for rows, *others in shapes:
        if others:
            small, large = sorted((rows, math.prod(others)))
            total += _ROUNDS * (4 * small**2 * large + 2 * small**3)
    return total


def make_outer(kind: str, synced: SyncedSlice, *, rate: float, momentum: float, peak: float) -> OuterStep:
    """Build a step by its name in `sync.outer`; `peak` is the highest rate of the replicas."""
    weights = synced.agreed[synced.weights]
    if kind in ("trust", "muon"):
        relative: type[_Relative] = Trust if kind == "trust" else Muon
        return relative(weights, rate=rate, momentum=momentum, peak=peak, matrices=synced.matrices)
    kinds: dict[str, type[OuterStep]] = {"slowmo": SlowMo, "nesterov": Nesterov, "adam": Adam}
    return kinds[kind](weights, rate=rate, momentum=momentum, peak=peak)


@final
class Outer(Agreement):
    """Wraps an agreement after which all replicas are equal."""

    def __init__(self, inner: Agreement, step: OuterStep) -> None:
        super().__init__(inner.synced)
        self._inner, self._step = inner, step
        self._weights = self._agreed[inner.synced.weights]
        self._last = torch.empty_like(self._weights)
        self._inner.met = lambda mean: self.met(mean)  # noqa: PLW0108 - whoever is told of it later

    @override
    def start(self) -> None:
        self._step.start(self._weights)
        self.resume()

    @override
    def resume(self) -> None:
        self._last.copy_(self._weights)
        self._inner.start()

    @override
    def prepare(self, number: int, *, whole: bool) -> None:
        self._inner.prepare(number, whole=whole)

    @override
    def begin(self, index: int) -> None:
        self._inner.begin(index)

    @override
    def add(self, index: int, share: float, rate: float = 0.0) -> None:
        self._inner.add(index, share, rate)

    @override
    def reach(self, comm: Communicator, *, request: float, rate: float) -> None:
        self._inner.reach(comm, request=request, rate=rate)
        self._step.move(self._last, torch.sub(self._last, self._weights, out=self._weights), rate)
        self._weights.copy_(self._last)
        self._inner.start()

    @property
    @override
    def leaves_out(self) -> bool:
        return self._inner.leaves_out

    @override
    def watch(self, steps: int) -> None:
        self._inner.watch(steps)

    @override
    def settle(self) -> None:
        self._inner.settle()

    @override
    def close(self) -> None:
        self._inner.close()

    @property
    @override
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    @override
    def requests(self) -> torch.Tensor:
        return self._inner.requests

    @override
    def state(self) -> KeptState:
        inner = self._inner.state()
        return KeptState(shared={**inner.shared, **self._step.state()}, own=inner.own)
