"""`slowmo`, slow momentum over syncs.

For users: docs/synchronisation.md#slowmo
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.outer.outer_step import OuterStep


@final
class SlowMo(OuterStep):
    """u ← momentum · u + d / γ, z ← z − rate · γ · u, with γ the replicas' rate (Wang et al. 2020)."""

    name = "slowmo"
    usual = (1.0, 0.5)

    @override
    def move(self, last: torch.Tensor, change: torch.Tensor, rate: float) -> None:
        self.velocity.mul_(self.momentum).add_(change, alpha=1 / rate)
        last.sub_(self.velocity, alpha=self.rate * rate)


KIND: Final = SlowMo
