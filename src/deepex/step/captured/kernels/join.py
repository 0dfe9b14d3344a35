"""Maps side by side along their channels, in one launch; backwards nothing is copied.

    z = join([a, b, c])      # torch.cat([a, b, c], dim=1) of maps in channels-last order

The gradient of a part is a slice of the gradient of the whole. What takes it can mostly read it so (`activation.row_stride`).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from deepex.step.captured.kernels.activation import row_stride
from deepex.step.captured.kernels.division import as_rows

MOST: Final = 8  # parts that one launch joins
_TILE: Final = 2048  # elements of a program: two 16-byte accesses of bf16 for each of 128 threads


@triton.jit
def _place(
    part, count, out, tile, offset, total, num_rows, row_tiles, UNIT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Copy the tile if it is one of this part's; the tile's number and the channels in front as the next part counts them."""
    channels = count * UNIT
    blocks = (channels + CHANNELS - 1) // CHANNELS
    tiles = row_tiles * blocks
    if (tile >= 0) & (tile < tiles):
        row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        channel = tile % blocks * CHANNELS + tl.arange(0, CHANNELS)
        inside = (row < num_rows)[:, None] & (channel < channels)[None, :]
        value = tl.load(part + row[:, None] * channels + channel[None, :], mask=inside)
        tl.store(out + row[:, None] * (total * UNIT) + offset * UNIT + channel[None, :], value, mask=inside)
    return tile - tiles, offset + count


@triton.jit
def join_kernel(
    part0, part1, part2, part3, part4, part5, part6, part7, count0, count1, count2, count3, count4, count5, count6, count7,
    out, total, num_rows, row_tiles, COUNT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Channels are counted in units, so that the compiler knows that rows begin at multiples of it."""
    tile = tl.program_id(0)
    tile, offset = _place(part0, count0, out, tile, 0, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    tile, offset = _place(part1, count1, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 2:
        tile, offset = _place(part2, count2, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 3:
        tile, offset = _place(part3, count3, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 4:
        tile, offset = _place(part4, count4, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 5:
        tile, offset = _place(part5, count5, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 6:
        tile, offset = _place(part6, count6, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)
    if COUNT > 7:
        tile, offset = _place(part7, count7, out, tile, offset, total, num_rows, row_tiles, UNIT, ROWS, CHANNELS)


def can_join(maps: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel does this: 2…8 maps in channels-last order that differ in their channels at most."""
    first = maps[0]
    return 2 <= len(maps) <= MOST and all(
        part.dim() == 4
        and part.is_contiguous(memory_format=torch.channels_last)
        and (part.dtype, part.device, part.shape[0], part.shape[2:]) == (first.dtype, first.device, first.shape[0], first.shape[2:])
        and part.is_floating_point()
        and part.numel() > 0
        for part in maps
    )


def join(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """The maps' channels one after the other; see `can_join`."""
    joined: torch.Tensor = _Join.apply(*maps)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *maps: torch.Tensor) -> torch.Tensor:
        ctx.counts = [part.shape[1] for part in maps]
        return _join(maps, ctx.counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g = as_rows(g) if row_stride(g) is None else g  # once, rather than by each part
        return tuple(part if needed else None for part, needed in zip(g.split(ctx.counts, 1), ctx.needs_input_grad, strict=True))


def _join(maps: Sequence[torch.Tensor], counts: list[int]) -> torch.Tensor:
    batch, _, height, width = maps[0].shape
    shape = (batch, sum(counts), height, width)
    out = torch.empty(shape, dtype=maps[0].dtype, device=maps[0].device, memory_format=torch.channels_last)
    rows, unit = batch * height * width, math.gcd(8, *counts)
    block = min(triton.next_power_of_2(max(counts)), 64)  # a line of the cache
    row_tiles = triton.cdiv(rows, _TILE // block)
    programs = row_tiles * sum(triton.cdiv(count, block) for count in counts)
    spare, units = MOST - len(maps), [count // unit for count in counts]
    join_kernel[(programs,)](
        *(*maps, *[maps[0]] * spare, *units, *units[:1] * spare),
        *(out, sum(units), rows, row_tiles, len(maps), unit, _TILE // block, block),
        num_warps=4,
    )
    return out
