"""Convolutions of images whose squares are folded into channels (take.py): few channels, a window of some pixels, no padding.

    y = folded_forward(x, weight, bias)            # (n, 16, 115, 115), window 4×4 → (n, 64, 112, 112)
    dw = folded_weight_gradient(dy, x, side=4)     # in float32

In channels-last order, what a line of the window covers lies in one piece. So the matrix of rows (pixels of the output) × taps
(line, column, channel) is gathered in pieces of whole vectors, most of them from the cache, where neighbours have left them; and
the weight in the same order is the other factor. Libraries take several times what the memory needs for this.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from deepex.step.captured.kernels.activation import sum_parts
from deepex.step.captured.kernels.division import as_rows, divide_rows, processors, tile
from deepex.step.captured.kernels.thin_kernel import multiply

_TAPS: Final = (32, 64, 128, 256)
_MAX_CHANNELS: Final = 128
_FORWARD_ROWS: Final = 128  # of a tile
_GRADIENT_ROWS: Final = 64


@triton.jit
def _covered(
    x, row, end, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, SIDE: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """What the windows of these rows cover: rows × taps."""
    LINES: tl.constexpr = HEIGHT - SIDE + 1
    COLUMNS: tl.constexpr = WIDTH - SIDE + 1
    PIECE: tl.constexpr = SIDE * FEW
    tap = tl.arange(0, TAPS)
    pixel = (row // (LINES * COLUMNS) * HEIGHT + row // COLUMNS % LINES) * WIDTH + row % COLUMNS
    at = (pixel * FEW)[:, None] + (tap // PIECE * (WIDTH * FEW) + tap % PIECE)[None, :]
    return tl.load(x + at, mask=(row < end)[:, None], other=0.0)


@triton.jit
def folded_kernel(
    x, weight, bias, out, num_rows, rows_each,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, SIDE: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, CHANNELS)
    known = channel < NUM_CHANNELS
    kernel = tl.load(weight + channel[None, :] * TAPS + tl.arange(0, TAPS)[:, None], mask=known[None, :], other=0.0)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        covered = _covered(x, row, end, HEIGHT, WIDTH, FEW, SIDE, TAPS)
        value = multiply(covered, kernel, tl.zeros((ROWS, CHANNELS), tl.float32))
        if BIAS:
            value += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
        at, inside = tile(row, channel, end, NUM_CHANNELS)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def folded_gradient_kernel(
    g, x, partial, num_rows, rows_each,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, SIDE: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Channels × taps of the weight's gradient, from some rows."""
    channel = tl.arange(0, CHANNELS)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    total = tl.zeros((CHANNELS, TAPS), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, channel, end, NUM_CHANNELS)
        value = tl.load(g + at, mask=inside, other=0.0)
        total = multiply(tl.trans(value), _covered(x, row, end, HEIGHT, WIDTH, FEW, SIDE, TAPS), total)
    place = partial + (tl.program_id(0) * NUM_CHANNELS + channel)[:, None].to(tl.int64) * TAPS + tl.arange(0, TAPS)[None, :]
    tl.store(place, total, mask=(channel < NUM_CHANNELS)[:, None])


def can_be_folded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether these kernels do an unpadded convolution of stride 1; they are for bf16, which sets no other precision's pace."""
    channels, few, side, across = weight.shape
    fits = side == across > 1 and few % 8 == 0 and few * side * side in _TAPS and channels <= _MAX_CHANNELS and channels % 8 == 0
    return fits and x.dtype == weight.dtype == torch.bfloat16 and x.numel() < 2**31


def folded_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The convolution, plus bias."""
    x, weight = as_rows(x), as_rows(weight)
    channels, few, side, _ = weight.shape
    n, _, height, width = x.shape
    shape = (n, channels, height - side + 1, width - side + 1)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, taps = out.numel() // channels, few * side * side
    each, parts = divide_rows(rows, _FORWARD_ROWS, 8 * processors(x.device))
    folded_kernel[(parts,)](
        *(x, weight, x if bias is None else bias, out, rows, each, height, width, few, side, channels),
        *(bias is not None, _FORWARD_ROWS, max(16, triton.next_power_of_2(channels)), taps, 1),
        num_warps=4,
    )
    return out


def folded_weight_gradient(g: torch.Tensor, x: torch.Tensor, side: int) -> torch.Tensor:
    """The weight's gradient from that of the output, g."""
    g, x = as_rows(g), as_rows(x)
    (_, channels, _, _), (_, few, height, width) = g.shape, x.shape
    rows, taps = g.numel() // channels, few * side * side
    each, parts = divide_rows(rows, _GRADIENT_ROWS, 2 * processors(x.device))
    partial = torch.empty((parts, channels * taps), device=x.device)
    folded_gradient_kernel[(parts,)](
        *(g, x, partial, rows, each, height, width, few, side, channels),
        *(_GRADIENT_ROWS, max(16, triton.next_power_of_2(channels)), taps, 2),
        num_warps=4,
    )
    return sum_parts(partial).view(channels, side, side, few).permute(0, 3, 1, 2)
