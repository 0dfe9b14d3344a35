"""Integer and boolean buffers of a network (batch norm's counters), for replicas that take turns on it.

They are not averaged. Each replica's turn starts from the same values, and what the rank's first replica made of them is kept: so
they read as if every replica had a network of its own, on any number of ranks.
"""

import torch
from torch import nn


class Counters:
    """The counters of `network`; does nothing for a lone replica.

    Replicas may be in groups that take turns one after another: each group begins where the stretch did, and its later pieces where
    the first of its replicas was.
    """

    def __init__(self, network: nn.Module, replicas_per_rank: int) -> None:
        found = [buffer for buffer in network.buffers() if not buffer.is_floating_point()]
        self._buffers = found if replicas_per_rank > 1 else []
        self._start, self._before, self._kept, self._final = ([buffer.clone() for buffer in self._buffers] for _ in range(4))

    def open(self) -> None:
        """Begin a stretch."""
        _copy(self._start, self._buffers)

    def begin(self, *, first: bool, opens: bool) -> None:
        """Before a turn: whether it is the `first` of a piece, and the piece `opens` its group's stretch."""
        if opens:
            _copy(self._before, self._start)
        elif first:
            _copy(self._before, self._kept)
        _copy(self._buffers, self._before)

    def end(self, index: int, *, first: bool) -> None:
        """After the turn of the rank's replica number `index`."""
        if first:
            _copy(self._kept, self._buffers)
        if index == 0:
            _copy(self._final, self._buffers)

    def agreed(self) -> None:
        """After the last turn of a stretch."""
        _copy(self._buffers, self._final)


def _copy(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)
