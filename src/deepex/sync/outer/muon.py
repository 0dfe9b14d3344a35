"""`muon`, orthogonal steps along the agreed change.

For users: docs/synchronisation.md#muon
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.outer.relative import Relative, norms

_ROUNDS: Final = 5
_QUINTIC: Final = (
    3.4445,
    -4.7750,
    2.0315,
)  # of Newton-Schulz: singular values from 0.001 to 1 come to about 0.7 to 1.2 in five rounds
_DISTANCE: Final = 0.2  # its rate times the root of the steps in an epoch: the best for three networks was 0.14 to 0.3 …
_MOST_RATE: Final = 0.04  # … and at most this: in epochs of 5 and 16 steps longer ones learnt less


@final
class Muon(Relative):
    """The direction is the nearest matrix with orthonormal rows or columns.

    Muon: Jordan et al. 2024; over syncs: Thérien et al. 2025, MuLoCo.
    """

    name = "muon"
    usual = (0.05, 0.9)

    @override
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        return orthogonal(changes)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the same singular vectors, and singular values near 1, by Newton-Schulz; in bf16 on a GPU."""
    x = (matrices / norms(matrices).clamp(min=1e-30)).to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
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


def muon_rate(steps: int) -> float:
    """The rate for epochs of so many steps, with a sync at each."""
    return min(float(f"{_DISTANCE / math.sqrt(steps):.2g}"), _MOST_RATE)


KIND: Final = Muon
