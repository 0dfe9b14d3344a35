"""Average pooling over whole maps, whose gradient is written once, and where it is wanted: in channels-last order.

    y = mean(x)      # (n, c, h, w) → (n, c, 1, 1), as torch.nn.AdaptiveAvgPool2d(1)

PyTorch's is written in the order of the images first, and then copied.
"""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable


def mean(x: torch.Tensor) -> torch.Tensor:
    """Of each map."""
    return cast("torch.Tensor", _Mean.apply(x))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        share: torch.Tensor = g / (ctx.shape[2] * ctx.shape[3])
        return share.expand(ctx.shape).contiguous(memory_format=torch.channels_last)
