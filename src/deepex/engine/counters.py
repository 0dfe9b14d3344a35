"""Integer and boolean buffers of a network (batch norm's counters), for replicas that take turns on it.

They are not averaged. Each replica's turn starts from the same values, and what the rank's first replica made of them is kept: so
they read as if every replica had a network of its own, on any number of ranks.
"""

import torch
from torch import nn


class Counters:
    """The counters of `network`; does nothing for a lone replica."""

    def __init__(self, network: nn.Module, replicas_per_rank: int) -> None:
        found = [buffer for buffer in network.buffers() if not buffer.is_floating_point()]
        self._buffers = found if replicas_per_rank > 1 else []
        self._before = [buffer.clone() for buffer in self._buffers]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def begin(self, index: int) -> None:
        """Before the turn of the rank's replica number `index`."""
        if index == 0:
            _copy(self._before, self._buffers)
        else:
            _copy(self._buffers, self._before)

    def end(self, index: int) -> None:
        """After it."""
        if index == 0:
            _copy(self._kept, self._buffers)

    def agreed(self) -> None:
        """After the last turn of a segment."""
        _copy(self._buffers, self._kept)


def _copy(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)
