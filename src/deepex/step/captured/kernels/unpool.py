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

from deepex.step.captured.kernels.activation import sum_parts
from deepex.step.captured.kernels.division import processors
from deepex.step.captured.kernels.normalise import finish_gradients


@triton.jit
def _cell(first, num_cells, cells_down, cells_across, CELLS: tl.constexpr):
    """Of some cells: image, line, column, and which of them there are."""
    cell = first + tl.arange(0, CELLS)
    line = cell // cells_across
    return line // cells_down, line % cells_down, cell % cells_across, cell < num_cells


@triton.jit
def _position(
    image, cell_i, cell_j, wanted, channel, known, height, width, num_channels,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, PHASE_I: tl.constexpr, PHASE_J: tl.constexpr,
):  # fmt: skip
    """Where one place of each cell is in the map, and whether it is inside."""
    i = cell_i * STRIDE + PHASE_I - PADDING
    j = cell_j * STRIDE + PHASE_J - PADDING
    inside = (wanted & (i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & known[None, :]
    return ((image * height + i) * width + j).to(tl.int64)[:, None] * num_channels + channel[None, :], inside


@triton.jit
def _unpooled(
    g, where, image, cell_i, cell_j, wanted, channel, known, pooled_height, pooled_width, num_channels,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PHASE_I: tl.constexpr, PHASE_J: tl.constexpr, CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
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
    g, where, y, factors, dy, partial, height, width, pooled_height, pooled_width, cells_down, cells_across, num_cells,
    num_channels, num_parts,
    NORM: tl.constexpr, SUMS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of what was pooled, behind a norm by its factors; with SUMS, also each program's sums of it."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)  # the last cells first: a pass over the sums leaves them in the cache
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    if NORM:
        f0 = tl.load(factors + channel, mask=known, other=0.0)
        f1 = tl.load(factors + num_channels + channel, mask=known, other=0.0)
        f2 = tl.load(factors + 2 * num_channels + channel, mask=known, other=0.0)
    if SUMS:
        total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for first in range(part * CELLS, num_cells, num_parts * CELLS):
        image, cell_i, cell_j, wanted = _cell(first, num_cells, cells_down, cells_across, CELLS)
        for phase_i in tl.static_range(STRIDE):
            for phase_j in tl.static_range(STRIDE):
                at, inside = _position(
                    image, cell_i, cell_j, wanted, channel, known, height, width, num_channels, STRIDE, PADDING, phase_i, phase_j
                )
                if NORM:
                    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
                d = _unpooled(
                    g, where, image, cell_i, cell_j, wanted, channel, known, pooled_height, pooled_width, num_channels,
                    KERNEL, STRIDE, phase_i, phase_j, CELLS, CHANNELS,
                )  # fmt: skip
                if SUMS:
                    total += d
                if NORM:
                    d = f0[None, :] * d + f1[None, :] * value + f2[None, :]
                tl.store(dy + at, d.to(dy.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(partial + part * num_channels + channel, tl.sum(total, 0), mask=known)


@triton.jit
def unpooled_sums_kernel(
    g, where, y, partial, saved, height, width, pooled_height, pooled_width, cells_down, cells_across, num_cells, num_channels,
    num_parts,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, CELLS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Each program's sums of the gradient d that the pooling passes on, and of d·(y − mean). They move over the map together."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    mean = tl.load(saved + channel, mask=known, other=0.0)
    total = tl.zeros((CELLS, CHANNELS), tl.float32)
    along = tl.zeros((CELLS, CHANNELS), tl.float32)
    for first in range(part * CELLS, num_cells, num_parts * CELLS):
        image, cell_i, cell_j, wanted = _cell(first, num_cells, cells_down, cells_across, CELLS)
        for phase_i in tl.static_range(STRIDE):
            for phase_j in tl.static_range(STRIDE):
                at, inside = _position(
                    image, cell_i, cell_j, wanted, channel, known, height, width, num_channels, STRIDE, PADDING, phase_i, phase_j
                )
                value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
                d = _unpooled(
                    g, where, image, cell_i, cell_j, wanted, channel, known, pooled_height, pooled_width, num_channels,
                    KERNEL, STRIDE, phase_i, phase_j, CELLS, CHANNELS,
                )  # fmt: skip
                total += d
                along += d * (value - mean[None, :])
    place = partial + part * 2 * num_channels + channel
    tl.store(place, tl.sum(total, 0), mask=known)
    tl.store(place + num_channels, tl.sum(along, 0), mask=known)


def max_pool_backward(
    g: Tensor, where: Tensor, size: tuple[int, int], kernel: int, stride: int, padding: int, *, bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gradient of a map of `size` (height, width) that was pooled; with `bias` also its float32 sums per channel."""
    g = channels_last(g)
    batch, channels = g.shape[:2]
    dy = torch.empty((batch, channels, *size), dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    cells = _Cells(dy, g, kernel, stride, padding)
    parts = cells.parts(6 * processors(g.device)) if bias else cells.tiles  # measured on an H200: 4 and 8 take 5 % longer
    partial = torch.empty((parts, channels), dtype=torch.float32, device=g.device) if bias else dy
    unpool_kernel[parts, cells.blocks](
        *(g, where, dy, dy, dy, partial, *cells.sizes, channels, parts), NORM=False, SUMS=bias, num_warps=4, **cells.constants
    )
    return dy, sum_parts(partial) if bias else None


def pooled_norm_sums(
    y: Tensor, g: Tensor, where: Tensor, gamma: Tensor, saved: Tensor, kernel: int, stride: int, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a norm's scale and shift behind which was pooled, and the factors that `pooled_norm_gradient` needs."""
    y, g = channels_last(y), channels_last(g)
    cells = _Cells(y, g, kernel, stride, padding)
    channels = y.shape[1]
    parts = cells.parts(4 * processors(y.device))
    partial = torch.empty((parts, 2, channels), dtype=torch.float32, device=y.device)
    unpooled_sums_kernel[parts, cells.blocks](
        *(g, where, y, partial, saved, *cells.sizes, channels, parts), num_warps=4, **cells.constants
    )
    found = torch.empty((5, channels), dtype=torch.float32, device=y.device)
    finish_gradients(partial, (gamma, saved, gamma, saved), found[:2], found[2:], y.numel() // channels)
    return found[0], found[1], found[2:]


def pooled_norm_gradient(y: Tensor, g: Tensor, where: Tensor, factors: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Return dy = factors[0]·d + factors[1]·y + factors[2] per channel, d the gradient behind the norm."""
    y, g = channels_last(y), channels_last(g)
    cells = _Cells(y, g, kernel, stride, padding)
    dy = torch.empty_like(y)
    unpool_kernel[cells.tiles, cells.blocks](
        *(g, where, y, factors, dy, dy, *cells.sizes, y.shape[1], cells.tiles),
        NORM=True,
        SUMS=False,
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
