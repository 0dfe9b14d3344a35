"""Where in host memory a feed finds the samples of a batch: the contract that cache, windows and memory maps keep.

store.begin(epoch, turns)
store.fill(begin, end, images, labels)      # the samples at `begin` up to `end` of the epoch's order
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepex.data.feeds.samples import Turn


class Store(ABC):
    """Fills the batches of an epoch, in the order of its turns. One thread uses it at a time."""

    @abstractmethod
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        """Start an epoch, or the rest of one."""

    @abstractmethod
    def fill(self, begin: int, end: int, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        """Write a batch into given arrays; wait for what is not there yet, and raise what went wrong with it."""

    @abstractmethod
    def close(self) -> None:
        """Stop what works in the background; whoever waits is let go."""
