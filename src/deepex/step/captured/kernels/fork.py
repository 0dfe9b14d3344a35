"""One map for several users, whose gradients are added up in one pass.

    one, other, third = fork(x, 3)     # the same memory three times
    total([g, None, h])                # g + h, summed in float32

Autograd would add the gradients of k users in k − 1 passes over memory, rounding after each. Here they come to the backward pass
apart, and one kernel reads each once. A gradient may be some of the channels of wider maps, as that of a concatenation is.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from deepex.step.captured.kernels.activation import row_stride
from deepex.step.captured.kernels.division import as_rows

MOST: Final = 8  # gradients that one launch adds up
_TILE: Final = 2048  # elements of a program: two 16-byte loads of bf16 for each of 128 threads, of every gradient


@triton.jit
def _plus(total, g, stride, row, channel, inside):
    return total + tl.load(g + row[:, None] * stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def total_kernel(
    g0, g1, g2, g3, g4, g5, g6, g7, out, stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7,
    num_rows, num_channels, num_blocks, COUNT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = (program % num_blocks).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < num_rows)[:, None] & (channel < num_channels)[None, :]
    total = _plus(tl.zeros((ROWS, CHANNELS), tl.float32), g0, stride0, row, channel, inside)
    total = _plus(total, g1, stride1, row, channel, inside)
    if COUNT > 2:
        total = _plus(total, g2, stride2, row, channel, inside)
    if COUNT > 3:
        total = _plus(total, g3, stride3, row, channel, inside)
    if COUNT > 4:
        total = _plus(total, g4, stride4, row, channel, inside)
    if COUNT > 5:
        total = _plus(total, g5, stride5, row, channel, inside)
    if COUNT > 6:
        total = _plus(total, g6, stride6, row, channel, inside)
    if COUNT > 7:
        total = _plus(total, g7, stride7, row, channel, inside)
    tl.store(out + row[:, None] * num_channels + channel[None, :], total.to(out.dtype.element_ty), mask=inside)


def total(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that are there, in channels-last order; a single one as it is, None if there is none."""
    there = [g for g in gradients if g is not None]
    while len(there) > 1:
        there = [_total(there[:MOST]), *there[MOST:]]
    return there[0] if there else None


def fork(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """`x` for `count` users, none of which may change it in place: autograd could not tell."""
    forked: tuple[torch.Tensor, ...] = _Fork.apply(x, count)
    return forked


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        where = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        # not views: autograd must keep them apart
        return tuple(torch.empty(0, dtype=x.dtype, device=x.device).set_(*where) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return total(gradients), None


def _total(gradients: list[torch.Tensor]) -> torch.Tensor:
    shape, channels = gradients[0].shape, gradients[0].shape[1]
    ordered = [g if row_stride(g) is not None else as_rows(g) for g in gradients]
    apart = [row_stride(g) for g in ordered]
    strides = [channels if stride is None else stride for stride in apart]
    out = torch.empty(shape, dtype=ordered[0].dtype, device=ordered[0].device, memory_format=torch.channels_last)
    if all(stride == channels for stride in strides):  # then all of it is one row, and no tile is cut off by the channels' number
        rows, channels, block = 1, out.numel(), _TILE
    else:
        rows, block = out.numel() // channels, min(triton.next_power_of_2(channels), 64)
    num_blocks, spare = triton.cdiv(channels, block), MOST - len(ordered)
    total_kernel[(triton.cdiv(rows, _TILE // block) * num_blocks,)](
        *(*ordered, *ordered[:1] * spare, out, *strides, *strides[:1] * spare),
        *(rows, channels, num_blocks, len(ordered), _TILE // block, block),
        num_warps=4,
    )
    return out
