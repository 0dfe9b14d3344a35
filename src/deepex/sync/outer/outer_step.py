"""What every optimiser over syncs keeps to: the change that replicas agreed on is taken as a gradient.

With z the weights last agreed, m the mean of the replicas' and d = z − m. Every rank computes the same step from the same numbers,
so nothing more is sent. Batch-norm statistics and the replicas' own momentum are the mean and no more. With period 1 and no inner
momentum, d is the mean gradient times the rate, so these are large-batch optimisers too, whose scale is taken *after* the average:
LARS in each replica divides by the norm of its own noisy gradient, which many replicas together do not have.

Those whose steps do not shrink with d (`adam`, `trust`, `muon`) follow the schedule of the learning rate by its share of the peak.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from deepex.sync.synced_slice import SyncedSlice


class OuterStep(ABC):
    """Moves the agreed weights along a change, in place; `velocity` and what else it remembers is the same on every rank.

    `usual`: its rate and momentum unless others are asked for. `peak`: the highest rate of the replicas.
    """

    name: ClassVar[str]
    usual: ClassVar[tuple[float, float]]

    def __init__(self, synced: SyncedSlice, *, rate: float, momentum: float, peak: float) -> None:
        self.rate, self.momentum, self.peak = rate, momentum, peak
        weights = synced.agreed[synced.weights]
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
