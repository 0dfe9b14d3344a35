"""`nesterov`, DiLoCo's outer optimiser.

For users: docs/synchronisation.md#nesterov
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.outer.outer_step import OuterStep


@final
class OuterNesterov(OuterStep):
    """u ← momentum · u + d, z ← z − rate · (d + momentum · u): DiLoCo (Douillard et al. 2023)."""

    name = "nesterov"
    usual = (0.7, 0.9)

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self.velocity.mul_(self.momentum).add_(change)
        last.sub_(change, alpha=self.rate).sub_(self.velocity, alpha=self.rate * self.momentum)


KIND: Final = OuterNesterov
