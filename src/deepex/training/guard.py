"""That a network is still made of what it was when its arena was made."""

import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.arena.held import Held
from deepex.errors import ConfigError


class NetworkGuard:
    """Looks where the tensors of a network are, and for several replicas, whether what should stand still does."""

    def __init__(self, network: nn.Module, arena: Arena, *, replicas: int) -> None:
        self._arena, self._several = arena, replicas > 1
        self._held, self._still = Held(network), self._sum_still()

    def check(self) -> None:
        """Raise ConfigError if the network has changed what it may not."""
        self._held.check()
        if self._sum_still() != self._still:
            names = ", ".join(repr(slot.name) for slot in self._arena.layout.frozen[:4])
            raise ConfigError(
                f"the network has changed frozen weights, or buffers of a layer in evaluation mode (some of {names} …), and its "
                "replicas do not agree on them, as it did not do so in a first step: let it do so in all, or use one replica"
            )

    def _sum_still(self) -> int:
        """Of the bits of all that should stand still; replicas agree on nothing of it."""
        return int(self._arena.frozen.view(torch.int32).sum(dtype=torch.int64)) if self._several else 0
