"""What every code for a wire keeps to."""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch

BLOCK: Final = 256  # numbers that may share a scale: what is coded is a multiple of so many


class Code(ABC):
    """Numbers in fewer bytes: codes of type `dtype`, and scales where it needs them."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def num_scales(self, count: int) -> int:
        """How many scales, of 4 bytes, so many numbers have."""
        return 0

    @abstractmethod
    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of a vector, a multiple of BLOCK long, and their scales."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor) -> None:
        """Write the vector that codes stand for."""
