"""Max pooling backwards, as a gather: every position looks at the windows that hold it and adds the gradients that point to it.

    max_pool_backward(g, where, (112, 112), 3, 2, 1)  # `g` and `where` of the pooled map; the gradient of what was pooled
    pooled_norm_sums(…); pooled_norm_gradient(…)      # the same through a batch norm in front, without the map between them

Nothing is added atomically: the same bits in every run. The map is walked in cells of stride × stride positions, since the
positions of a cell ask the same windows, and a position's place in its cell says, when the kernel is compiled, which places of
which windows it can be. Gradients are added in float32.
"""

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepex.engine.kernels.norm import finish_gradient
from deepex.engine.kernels.workspace import arrivals

PROCESSORS = 132  # of an H200
PARTS_AT_ONCE = 64  # programs' sums that the last one adds at once


@triton.jit
def _unpooled(
    g,
    where,
    image,
    cell_i,
    cell_j,
    wanted,
    channel,
    known,
    pooled_height,
    pooled_width,
    num_channels,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PHASE_I: tl.constexpr,
    PHASE_J: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient at one place of each cell: the sum over windows t up and u to the left of the cell whose maximum it was."""
    d = tl.zeros((CELLS, CHANNELS), tl.float32)
    for t in tl.static_range((KERNEL - PHASE_I + STRIDE - 1) // STRIDE):
        for u in tl.static_range((KERNEL - PHASE_J + STRIDE - 1) // STRIDE):
            i = cell_i - t
            j = cell_j - u
            there = wanted & (i >= 0) & (i < pooled_height) & (j >= 0) & (j < pooled_width)
            mask = there[:, None] & known[None, :]
            at = ((image * pooled_height + i) * pooled_width + j).to(tl.int64)[:, None] * num_channels + channel[None, :]
            place = tl.load(where + at, mask=mask, other=-1)
            gradient = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
            d += tl.where(place == (PHASE_I + t * STRIDE) * KERNEL + PHASE_J + u * STRIDE, gradient, 0.0)
    return d


@triton.jit
def unpool_kernel(
    g,
    where,
    y,
    factors,
    dy,
    partial,
    arrived_count,
    bias_grad,
    height,
    width,
    pooled_height,
    pooled_width,
    cells_down,
    cells_across,
    num_cells,
    num_channels,
    num_parts,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the gradient of what was pooled, behind a norm by its factors; with BIAS, also its sums over the positions."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)  # the last cells first: a pass over the sums leaves them in the cache
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    if NORM:
        f0 = tl.load(factors + channel, mask=known, other=0.0)
        f1 = tl.load(factors + num_channels + channel, mask=known, other=0.0)
        f2 = tl.load(factors + 2 * num_channels + channel, mask=known, other=0.0)
    if BIAS:
        total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for first in range(part * CELLS, num_cells, num_parts * CELLS):
        cell = first + tl.arange(0, CELLS)
        wanted = cell < num_cells
        cell_j = cell % cells_across
        line = cell // cells_across
        cell_i = line % cells_down
        image = line // cells_down
        for phase_i in tl.static_range(STRIDE):
            for phase_j in tl.static_range(STRIDE):
                i = cell_i * STRIDE + phase_i - PADDING
                j = cell_j * STRIDE + phase_j - PADDING
                inside = (wanted & (i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & known[None, :]
                at = ((image * height + i) * width + j).to(tl.int64)[:, None] * num_channels + channel[None, :]
                if NORM:
                    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
                d = _unpooled(
                    g,
                    where,
                    image,
                    cell_i,
                    cell_j,
                    wanted,
                    channel,
                    known,
                    pooled_height,
                    pooled_width,
                    num_channels,
                    KERNEL,
                    STRIDE,
                    phase_i,
                    phase_j,
                    CELLS,
                    CHANNELS,
                )
                if BIAS:
                    total += d
                if NORM:
                    d = f0[None, :] * d + f1[None, :] * value + f2[None, :]
                tl.store(dy + at, d.to(dy.dtype.element_ty), mask=inside)
    if BIAS:
        tl.store(partial + part * num_channels + channel, tl.sum(total, 0), mask=known)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_count + tl.program_id(1), 1, sem="acq_rel")
        if arrived == num_parts - 1:
            tl.store(arrived_count + tl.program_id(1), 0)
            summed = tl.zeros((PARTS, CHANNELS), tl.float32)
            for first in range(0, num_parts, PARTS):
                other = first + tl.arange(0, PARTS)
                there = (other < num_parts)[:, None] & known[None, :]
                summed += tl.load(partial + other[:, None] * num_channels + channel[None, :], mask=there, other=0.0)
            tl.store(bias_grad + channel, tl.sum(summed, 0), mask=known)


@triton.jit
def unpooled_sums_kernel(
    g,
    where,
    y,
    partial,
    arrived_count,
    gamma,
    saved,
    grads,
    factors,
    height,
    width,
    pooled_height,
    pooled_width,
    cells_down,
    cells_across,
    num_cells,
    num_rows,
    num_channels,
    num_parts,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sums of the gradient d that the pooling passes on, and of d·(y − mean). The programs move over the map together."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    m = tl.load(saved + channel, mask=known, other=0.0)
    sum_d = tl.zeros((CELLS, CHANNELS), tl.float32)
    sum_y = tl.zeros((CELLS, CHANNELS), tl.float32)
    for first in range(part * CELLS, num_cells, num_parts * CELLS):
        cell = first + tl.arange(0, CELLS)
        wanted = cell < num_cells
        cell_j = cell % cells_across
        line = cell // cells_across
        cell_i = line % cells_down
        image = line // cells_down
        for phase_i in tl.static_range(STRIDE):
            for phase_j in tl.static_range(STRIDE):
                i = cell_i * STRIDE + phase_i - PADDING
                j = cell_j * STRIDE + phase_j - PADDING
                inside = (wanted & (i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & known[None, :]
                at = ((image * height + i) * width + j).to(tl.int64)[:, None] * num_channels + channel[None, :]
                value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
                d = _unpooled(
                    g,
                    where,
                    image,
                    cell_i,
                    cell_j,
                    wanted,
                    channel,
                    known,
                    pooled_height,
                    pooled_width,
                    num_channels,
                    KERNEL,
                    STRIDE,
                    phase_i,
                    phase_j,
                    CELLS,
                    CHANNELS,
                )
                sum_d += d
                sum_y += d * (value - m[None, :])
    place = partial + part * 2 * num_channels + channel
    tl.store(place, tl.sum(sum_d, 0), mask=known)
    tl.store(place + num_channels, tl.sum(sum_y, 0), mask=known)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_count + tl.program_id(1), 1, sem="acq_rel")
    if arrived == num_parts - 1:
        tl.store(arrived_count + tl.program_id(1), 0)
        total = tl.zeros((PARTS, CHANNELS), tl.float32)
        along = tl.zeros((PARTS, CHANNELS), tl.float32)
        for first in range(0, num_parts, PARTS):
            other = first + tl.arange(0, PARTS)
            there = (other < num_parts)[:, None] & known[None, :]
            at = partial + other[:, None] * 2 * num_channels + channel[None, :]
            total += tl.load(at, mask=there, other=0.0)
            along += tl.load(at + num_channels, mask=there, other=0.0)
        finish_gradient(
            tl.sum(total, 0), tl.sum(along, 0), gamma, saved, grads, factors, channel, known, num_channels, num_rows * 1.0
        )


def max_pool_backward(
    g: Tensor, where: Tensor, size: tuple[int, int], kernel: int, stride: int, padding: int, *, bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gradient of a map of `size` (height, width) that was pooled; with `bias` also its float32 sums per channel."""
    g = channels_last(g)
    batch, channels = g.shape[:2]
    dy = torch.empty((batch, channels, *size), dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    cells = _Cells(dy, g, kernel, stride, padding)
    parts = cells.parts(4 * PROCESSORS) if bias else cells.tiles
    bias_grad = torch.empty(channels, dtype=torch.float32, device=g.device) if bias else None
    partial = torch.empty((parts, channels), dtype=torch.float32, device=g.device) if bias else None
    unpool_kernel[parts, cells.blocks](
        g,
        where,
        None,
        None,
        dy,
        partial,
        arrivals(g.device, cells.blocks) if bias else None,
        bias_grad,
        *cells.sizes,
        channels,
        parts,
        NORM=False,
        BIAS=bias,
        PARTS=PARTS_AT_ONCE,
        num_warps=4,
        **cells.constants,
    )
    return dy, bias_grad


def pooled_norm_sums(
    y: Tensor, g: Tensor, where: Tensor, gamma: Tensor, saved: Tensor, kernel: int, stride: int, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a norm's scale and shift behind which was pooled, and the factors that `pooled_norm_gradient` needs."""
    y, g = channels_last(y), channels_last(g)
    cells = _Cells(y, g, kernel, stride, padding)
    channels = y.shape[1]
    parts = cells.parts(4 * PROCESSORS)
    partial = torch.empty((parts, 2, channels), dtype=torch.float32, device=y.device)
    found = torch.empty((5, channels), dtype=torch.float32, device=y.device)
    unpooled_sums_kernel[parts, cells.blocks](
        g,
        where,
        y,
        partial,
        arrivals(y.device, cells.blocks),
        gamma,
        saved,
        found,
        found[2:],
        *cells.sizes,
        y.numel() // channels,
        channels,
        parts,
        PARTS=PARTS_AT_ONCE,
        num_warps=4,
        **cells.constants,
    )
    return found[0], found[1], found[2:]


def pooled_norm_gradient(y: Tensor, g: Tensor, where: Tensor, factors: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Return dy = factors[0]·d + factors[1]·y + factors[2] per channel, d the gradient behind the norm."""
    y, g = channels_last(y), channels_last(g)
    cells = _Cells(y, g, kernel, stride, padding)
    dy = torch.empty_like(y)
    unpool_kernel[cells.tiles, cells.blocks](
        g,
        where,
        y,
        factors,
        dy,
        None,
        None,
        None,
        *cells.sizes,
        y.shape[1],
        cells.tiles,
        NORM=True,
        BIAS=False,
        PARTS=PARTS_AT_ONCE,
        num_warps=4,
        **cells.constants,
    )
    return dy


@final
class _Cells:
    """How the kernels that go backwards divide a map: cells of stride × stride positions, counted with the padding."""

    def __init__(self, y: Tensor, g: Tensor, kernel: int, stride: int, padding: int) -> None:
        batch, channels, height, width = y.shape
        down, across = ((size - 1 + padding) // stride + 1 for size in (height, width))
        block = channel_block(channels)
        # 1024 elements by 4 warps, one 16-byte load per thread and place: of a cell's 4 places and 4 windows, 12 are in flight.
        tile = (1024 if stride < 3 else 512) // block
        self.blocks = triton.cdiv(channels, block)
        self.tiles = triton.cdiv(batch * down * across, tile)
        self.sizes = (height, width, *g.shape[2:], down, across, batch * down * across)
        self.constants = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding, "CELLS": tile, "CHANNELS": block}

    def parts(self, programs: int) -> int:
        """Programs per block of channels, for about as many programs in all, none without a tile."""
        return max(1, min(int(self.tiles), programs // int(self.blocks)))


def channel_block(channels: int) -> int:
    """64 channels of bfloat16 are a line of the cache; 32 where 64 would leave half a block empty."""
    return min(int(triton.next_power_of_2(channels)), 32 if channels % 64 == 32 else 64)


def channels_last(x: Tensor) -> Tensor:
    """Return x as rows of channels; itself, if it is that already."""
    return x.contiguous(memory_format=torch.channels_last)
