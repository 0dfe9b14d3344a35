"""Local response normalisation, as AlexNet, CaffeNet, GoogLeNet and Caffe's Cifar-10 network use it.

Written from slices and a two-dimensional pooling because `torch.nn.LocalResponseNorm` goes through a
three-dimensional average pooling, whose backward pass on CUDA is not deterministic, and because the sums need single
precision: in bfloat16 the term α·mean(x²) would be rounded away next to k.

>>> import torch
>>> LocalResponse(5, alpha=1e-4)(torch.ones(1, 8, 4, 4)).shape
torch.Size([1, 8, 4, 4])
"""

from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional


@final
class LocalResponse(nn.Module):
    """y = x / (k + α·mean(x²))^β, the mean over a window of `size` neighbours, zeros outside.

    The window runs over channels (Krizhevsky 2012, section 3.3) or, `within` a channel, over size×size points
    (Caffe's `WITHIN_CHANNEL`). α multiplies the mean, as in Caffe and PyTorch; Krizhevsky's multiplies the sum, so
    his α is `size` times smaller.
    """

    def __init__(
        self,
        size: int,
        *,
        alpha: float,
        beta: float = 0.75,
        k: float = 1.0,
        region: Literal["across", "within"] = "across",
    ) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k, self.region = size, alpha, beta, k, region
        self.is_local_response = region == "across"  # tells whoever has a kernel for it

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, in x's own precision and shape."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        square = precise.square()
        mean = self._mean_across(square) if self.region == "across" else self._mean_within(square)
        return (precise * (self.k + self.alpha * mean).pow(-self.beta)).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the constants where PyTorch prints the network."""
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}, region={self.region!r}"

    def _mean_across(self, square: Tensor) -> Tensor:
        """Average over neighbouring channels."""
        channels = square.shape[1]
        padded = functional.pad(square, (0, 0, 0, 0, self.size // 2, (self.size - 1) // 2))
        total = padded[:, :channels]
        for offset in range(1, self.size):
            total = total + padded[:, offset : offset + channels]
        return total / self.size

    def _mean_within(self, square: Tensor) -> Tensor:
        """Average over neighbouring points of the same channel."""
        return functional.avg_pool2d(square, self.size, stride=1, padding=self.size // 2)
