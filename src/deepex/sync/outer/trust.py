"""`trust`, trust ratios on the agreed change.

For users: docs/synchronisation.md#trust
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.outer.relative import Relative


@final
class Trust(Relative):
    """Trust ratios on the agreed change, of each matrix (after LARS and LAMB: You et al. 2017, 2020)."""

    name = "trust"
    usual = (0.02, 0.9)

    @override
    def _direction(self, changes: torch.Tensor) -> torch.Tensor:
        return changes


KIND: Final = Trust
