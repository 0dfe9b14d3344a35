"""Backwards through a bias and its ReLU in one pass over the gradient.

    dy, bias_grad = bias_relu_backward(g, z)      # dy = g where z > 0, else 0; bias_grad = the sums of dy over all rows, in float32

Maps are matrices of rows × channels (channels-last order); so are the inputs of dense layers. `g` may be some of the channels of
wider maps, as the gradient of a concatenation is.
"""

import torch
import triton
import triton.language as tl

from deepex.step.captured.kernels.division import FINISHED, as_rows, at_once, divide_rows, processors, tile


@triton.jit
def bias_kernel(
    g, z, dy, partial, num_rows, num_channels, stride, rows_each,
    MASKS: tl.constexpr, WRITES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at, inside = tile(row, channel, end, num_channels)
        value = tl.load(g + row[:, None] * stride + channel[None, :], mask=inside, other=0.0)
        if MASKS:
            value = tl.where(tl.load(z + at, mask=inside, other=0.0) > 0.0, value, 0.0)
        if WRITES:
            tl.store(dy + at, value, mask=inside)
        total += value.to(tl.float32)
    tl.store(partial + part * num_channels + channel, tl.sum(total, 0), mask=known)


@triton.jit
def sum_kernel(partial, out, num_channels, num_parts, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    total = tl.zeros((PARTS, CHANNELS), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < num_parts)[:, None] & known[None, :]
        total += tl.load(partial + part[:, None] * num_channels + channel[None, :], mask=there, other=0.0)
    tl.store(out + channel, tl.sum(total, 0), mask=known)


def bias_relu_backward(g: torch.Tensor, z: torch.Tensor, *, owned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(g where z > 0 else 0, its sums per channel in float32). `owned`: the first may lie where g does."""
    if g.shape != z.shape:
        raise ValueError(f"the gradient has shape {tuple(g.shape)}, the activation {tuple(z.shape)}: they have to be the same")
    z = as_rows(z)
    dy = g if owned and g.stride() == z.stride() else torch.empty_like(z, dtype=g.dtype)
    return dy, _launch(g, z, dy)


def bias_gradient(g: torch.Tensor) -> torch.Tensor:
    """The sums of g per channel, in float32."""
    return _launch(g, None, None)


def row_stride(g: torch.Tensor) -> int | None:
    """How far apart the rows of maps are, or of a matrix, whose channels lie side by side; None if they do not."""
    if g.dim() == 2:
        return g.stride(0) if g.stride(1) == 1 else None
    _, _, height, width = g.shape
    apart = g.stride(3)
    return apart if g.stride() == (height * width * apart, 1, width * apart, apart) else None


def _launch(g: torch.Tensor, z: torch.Tensor | None, dy: torch.Tensor | None) -> torch.Tensor:
    stride = row_stride(g)
    if stride is None:
        g = as_rows(g)
        stride = g.shape[1]
    channels = g.shape[1]
    rows = g.numel() // channels
    # 64 channels are 128 bytes of bf16: whole lines of the cache; a tile of 1,024 is 16 bytes for each of 128 threads, and eight
    # programs of 4 warps to a multiprocessor keep enough of them in flight.
    block = min(triton.next_power_of_2(channels), 64)
    height = 1024 // block
    num_blocks = triton.cdiv(channels, block)
    each, parts = divide_rows(rows, height, max(8 * processors(g.device) // num_blocks, 1))
    partial = torch.empty((parts, channels), dtype=torch.float32, device=g.device)
    bias_kernel[(parts, num_blocks)](
        *(g, g if z is None else z, g if dy is None else dy, partial, rows, channels, stride, each),
        *(z is not None, dy is not None, height, block),
        num_warps=4,
    )
    return sum_parts(partial)


def sum_parts(partial: torch.Tensor) -> torch.Tensor:
    """What programs found (parts, channels), added up in a fixed order."""
    parts, channels = partial.shape
    if parts == 1:
        return partial[0]
    out = torch.empty(channels, dtype=torch.float32, device=partial.device)
    sum_kernel[(triton.cdiv(channels, FINISHED),)](partial, out, channels, parts, FINISHED, at_once(parts), num_warps=4)
    return out
