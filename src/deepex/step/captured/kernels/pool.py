"""Max pooling with what stands in front of it, so that the activated map, the largest of a network, is never written.

    pooled, where = max_pool(y, 3, 2, 1, scale=scale, shift=shift, relu=True)  # one pass: pool(relu(norm(y)))
    NormReluPool.apply(y, gamma, beta, …)                                      # the same in training, with its gradients

Per pooled element, `where` keeps the position of the maximum in its window, −1 where the ReLU lets no gradient through; backwards
(`unpool.py`) that is all there is to know. The kernels compute in float32; maxima are compared after rounding to the map's own
type, as without fusion.
"""

from collections.abc import Callable
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepex.step.captured.kernels.normalise import statistics
from deepex.step.captured.kernels.unpool import (
    channel_block,
    channels_last,
    max_pool_backward,
    pooled_norm_gradient,
    pooled_norm_sums,
)

__all__ = [
    "NormReluPool",
    "ReluPool",
    "max_pool",
    "max_pool_backward",
    "pooled_norm_gradient",
    "pooled_norm_sums",
    "pooled_size",
    "statistics",
]


@triton.jit
def max_pool_kernel(
    y,
    scale,
    shift,
    pooled,
    where,
    height,
    width,
    pooled_height,
    pooled_width,
    num_lines,
    num_channels,
    tiles_across,
    FRONT: tl.constexpr,  # 0: nothing, 1: shift, 2: scale and shift
    RELU: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Each program DOWN × ACROSS pooled positions: neighbouring windows overlap, and what they share is read once."""
    tile = tl.program_id(0)
    index = tl.arange(0, DOWN * ACROSS)
    line = tile // tiles_across * DOWN + index // ACROSS
    column = tile % tiles_across * ACROSS + index % ACROSS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    wanted = (line < num_lines) & (column < pooled_width)
    image = line // pooled_height
    top = line % pooled_height * STRIDE - PADDING
    left = column * STRIDE - PADDING
    if FRONT == 2:
        a = tl.load(scale + channel, mask=known, other=0.0).to(tl.float32)
    if FRONT >= 1:
        b = tl.load(shift + channel, mask=known, other=0.0).to(tl.float32)
    loaded = wanted[:, None] & known[None, :]
    for dy in tl.static_range(KERNEL):
        for dx in tl.static_range(KERNEL):
            # A place outside the map becomes the nearest inside: in the same window, seen in the same order, and no mask is needed.
            i = tl.minimum(tl.maximum(top + dy, 0), height - 1)
            j = tl.minimum(tl.maximum(left + dx, 0), width - 1)
            at = ((image * height + i) * width + j).to(tl.int64)[:, None] * num_channels + channel[None, :]
            value = tl.load(y + at, mask=loaded, other=0.0).to(tl.float32)
            if FRONT == 2:
                value = value * a[None, :] + b[None, :]
            if FRONT == 1:
                value = value + b[None, :]
            if FRONT >= 1:
                value = value.to(y.dtype.element_ty).to(tl.float32)
            place = ((i - top) * KERNEL + j - left)[:, None]
            if dy + dx == 0:
                best = value
                best_place = tl.zeros((DOWN * ACROSS, CHANNELS), tl.int32) + place
            else:
                best_place = tl.where(value > best, place, best_place)
                best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)  # a NaN is seen, not lost
    if RELU:
        best_place = tl.where(best <= 0.0, -1, best_place)
        best = tl.where(best <= 0.0, 0.0, best)
    at = (line * pooled_width + column).to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(pooled + at, best.to(pooled.dtype.element_ty), mask=loaded)
    tl.store(where + at, best_place.to(tl.int8), mask=loaded)


def pooled_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """How many windows lie along `size` positions; with ceil_mode also one that hangs over the edge, if it begins inside."""
    span = size + 2 * padding - kernel
    fits = span >= 0 or (ceil_mode and span > -stride)
    if not (1 <= kernel <= 11 and stride >= 1 and 0 <= 2 * padding <= kernel and fits):
        raise ValueError(
            f"pooling {size} positions by kernel {kernel}, stride {stride}, padding {padding}: the kernel must be at most 11 (a "
            "place in it fits int8) and fit into the padded map, the padding at most half the kernel; "
            "torch.nn.functional.max_pool2d takes larger kernels"
        )
    if not ceil_mode:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count if (count - 1) * stride < size + padding else count - 1


def max_pool(
    y: Tensor,
    kernel: int,
    stride: int,
    padding: int = 0,
    ceil_mode: bool = False,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pool relu(y·scale + shift) or relu(y + bias); return the maxima and where in its window each was first found."""
    y = channels_last(y)
    batch, channels, height, width = y.shape
    down, across = (pooled_size(size, kernel, stride, padding, ceil_mode) for size in (height, width))
    pooled = torch.empty((batch, channels, down, across), dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
    where = torch.empty_like(pooled, dtype=torch.int8)
    # 2048 elements by 4 warps: two 16-byte loads per thread and place, 9 places in flight; 4 lines share 6 of 9 rows.
    block = channel_block(channels)
    tile_across = min((4, 8, 16), key=lambda tile: (-(-across // tile) * tile, -tile))
    tile_down = max(1, 2048 // block // tile_across)
    tiles_across = triton.cdiv(across, tile_across)
    grid = (triton.cdiv(batch * down, tile_down) * tiles_across, triton.cdiv(channels, block))
    max_pool_kernel[grid](
        y,
        scale,
        shift if bias is None else bias,
        pooled,
        where,
        height,
        width,
        down,
        across,
        batch * down,
        channels,
        tiles_across,
        FRONT=2 if scale is not None else int(bias is not None),
        RELU=relu,
        KERNEL=kernel,
        STRIDE=stride,
        PADDING=padding,
        DOWN=tile_down,
        ACROSS=tile_across,
        CHANNELS=block,
        num_warps=4,
    )
    return pooled, where


@final
class NormReluPool(torch.autograd.Function):
    """Batch norm in training, ReLU and max pooling, as the stem of a residual network has them: y is read twice each way."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        gamma: Tensor,
        beta: Tensor,
        norm: nn.BatchNorm2d,
        kernel: int,
        stride: int,
        padding: int,
        ceil_mode: bool,
    ) -> Tensor:
        """Return pool(relu(norm(y))) and move the running averages."""
        y = channels_last(y)
        saved = torch.empty((4, y.shape[1]), device=y.device)
        statistics(y, gamma, beta, norm, saved)
        pooled, where = max_pool(y, kernel, stride, padding, ceil_mode, saved[2], saved[3], relu=True)
        ctx.save_for_backward(y, where, gamma, saved)
        ctx.window = kernel, stride, padding
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of y, gamma and beta."""
        y, where, gamma, saved = ctx.saved_tensors
        g = channels_last(g)
        gamma_grad, beta_grad, factors = pooled_norm_sums(y, g, where, gamma, saved, *ctx.window)
        dy = pooled_norm_gradient(y, g, where, factors, *ctx.window) if ctx.needs_input_grad[0] else None
        return dy, gamma_grad.to(gamma.dtype), beta_grad.to(gamma.dtype), *[None] * 5


@final
class ReluPool(torch.autograd.Function):
    """Max pooling of relu(y + bias), or without the bias, or without the ReLU; y is not kept.

    `give` is called with the bias and its float32 gradient, which then does not go through autograd, where it would be rounded to
    the bias's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        relu: bool,
        kernel: int,
        stride: int,
        padding: int,
        ceil_mode: bool,
        give: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Return pool(relu(y + bias))."""
        pooled, where = max_pool(y, kernel, stride, padding, ceil_mode, bias=bias, relu=relu)
        ctx.save_for_backward(where)
        ctx.window = kernel, stride, padding
        ctx.size, ctx.bias, ctx.give = tuple(y.shape[2:]), bias, give
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of y and of the bias."""
        (where,) = ctx.saved_tensors
        dy, bias_grad = max_pool_backward(g, where, ctx.size, *ctx.window, bias=ctx.needs_input_grad[1])
        if bias_grad is not None and ctx.give is not None:
            ctx.give(ctx.bias, bias_grad)
            bias_grad = None
        return dy, None if bias_grad is None else bias_grad.to(ctx.bias.dtype), *[None] * 6
