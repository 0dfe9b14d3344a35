"""`adam`, Adam on the changes.

For users: docs/synchronisation.md#adam
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.outer.outer_step import OuterStep
from deepex.sync.synced_slice import SyncedSlice


@final
class OuterAdam(OuterStep):
    """Adam on the changes (FedAdam: Reddi et al. 2021), with the usual 0.99 for the squares, and `momentum`."""

    name = "adam"
    usual = (0.001, 0.9)

    _SQUARES: Final = 0.99
    _LEAST: Final = 1e-8

    def __init__(self, synced: SyncedSlice, *, rate: float, momentum: float, peak: float) -> None:
        super().__init__(synced, rate=rate, momentum=momentum, peak=peak)
        self._squares, self._count = torch.zeros_like(self.velocity), torch.zeros(1, dtype=self.velocity.dtype)

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


KIND: Final = OuterAdam
