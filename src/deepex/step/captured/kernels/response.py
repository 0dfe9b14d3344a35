"""Local response normalisation across channels: one pass forward, one backward, nothing kept but the input.

    LocalResponse.apply(x, 5, 1e-4, 0.75, 1.0)  # x / (k + α·mean over 5 neighbouring channels of x²)^β

`deepex.nets.response` has the definition. A program holds all channels of some rows of a channels-last map and passes sums over
neighbours between its threads; the backward pass computes the denominators s again, for less than reading them would cost:
dx_j = g_j·s_j^−β − (2αβ/size)·x_j·Σ g_i·x_i·s_i^(−β−1) over the windows i that hold j. Everything is computed in float32.
"""

from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepex.step.captured.kernels.division import tile


@triton.jit
def _window_sum(values, channel, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sum over the channels from BEFORE in front to AFTER behind each; zeros outside."""
    total = values
    for k in tl.static_range(BEFORE + AFTER + 1):
        if k != BEFORE:
            other = channel + (k - BEFORE)
            there = (other >= 0) & (other < CHANNELS)
            index = tl.where(there, other, 0)[None, :] + tl.zeros((ROWS, CHANNELS), tl.int32)
            total += tl.where(there[None, :], tl.gather(values, index, 1), 0.0)
    return total


@triton.jit
def _power(s, minus_beta, THREE_QUARTERS: tl.constexpr):
    """s^−β and 1/s. β = 3/4, which all published networks have, takes two roots, a third of the instructions."""
    if THREE_QUARTERS:
        root = tl.rsqrt(s)
        return root * tl.sqrt(root), root * root
    else:  # noqa: RET505 - Triton wants both returns in one branching
        return tl.exp2(minus_beta * tl.log2(s)), 1.0 / s


@triton.jit
def response_kernel(
    x, y, num_rows, num_channels, share, minus_beta, k,
    SIZE: tl.constexpr, THREE_QUARTERS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    at, inside = tile(row, channel, num_rows, num_channels)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s = k + share * _window_sum(value * value, channel, SIZE // 2, (SIZE - 1) // 2, ROWS, CHANNELS)
    power, _ = _power(s, minus_beta, THREE_QUARTERS)
    tl.store(y + at, (value * power).to(y.dtype.element_ty), mask=inside)


@triton.jit
def response_gradient_kernel(
    x, g, dx, num_rows, num_channels, share, minus_beta, k,
    SIZE: tl.constexpr, THREE_QUARTERS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    at, inside = tile(row, channel, num_rows, num_channels)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    s = k + share * _window_sum(value * value, channel, SIZE // 2, (SIZE - 1) // 2, ROWS, CHANNELS)
    power, inverse = _power(s, minus_beta, THREE_QUARTERS)
    scaled = gradient * power
    along = _window_sum(scaled * value * inverse, channel, (SIZE - 1) // 2, SIZE // 2, ROWS, CHANNELS)  # the window, mirrored
    result = scaled + 2.0 * share * minus_beta * value * along
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


@final
class LocalResponse(torch.autograd.Function):
    """x / (k + α·mean(x²))^β over a window of `size` channels; keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
        """Return x normalised, in x's own type and channels-last order."""
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        ctx.constants = size, alpha, beta, k
        ctx.save_for_backward(x)
        _launch(response_kernel, (x, y), *ctx.constants)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of x."""
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _launch(response_gradient_kernel, (x, g.contiguous(memory_format=torch.channels_last), dx), *ctx.constants)
        return dx, None, None, None, None


def _launch(kernel: Any, maps: tuple[Tensor, ...], size: int, alpha: float, beta: float, k: float) -> None:
    channels = maps[0].shape[1]
    rows = maps[0].numel() // channels
    # 2048 elements by 8 warps: one 16-byte load per thread and map, all resident threads of a processor together 32 KB in flight.
    block = triton.next_power_of_2(channels)
    height = max(1, 2048 // block)
    kernel[triton.cdiv(rows, height),](
        *(*maps, rows, channels, alpha / size, -float(beta), float(k), size, beta == 0.75, height, block), num_warps=8
    )
