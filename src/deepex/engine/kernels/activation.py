"""The gradients of a bias and of the ReLU behind it, in one pass over what comes back.

    dy, bias_grad = bias_relu_backward(g, z)   # z = relu(y + bias)
    bias_grad = bias_gradient(g)

Maps (n, channels, height, width) in channels-last order are matrices of rows × channels, as matrices themselves are. Each program
takes some rows of some channels and writes their sums; the one that arrives last adds them up in a fixed order: the same bits in
every run.
"""

import torch
import triton
import triton.language as tl

from deepex.engine.kernels.workspace import WORKSPACE, as_rows, divide_rows


@triton.jit
def bias_kernel(
    g,
    z,
    dy,
    partial,
    arrivals,
    bias_grad,
    num_rows,
    rows_each,
    num_parts,
    NUM_CHANNELS: tl.constexpr,
    MASKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < NUM_CHANNELS
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * NUM_CHANNELS + channel[None, :]
        value = tl.load(g + at, mask=inside, other=0.0)
        if MASKS:
            value = tl.where(tl.load(z + at, mask=inside, other=0.0).to(tl.float32) > 0.0, value, 0.0)
            tl.store(dy + at, value, mask=inside)
        total += value.to(tl.float32)
    tl.store(partial + part * NUM_CHANNELS + channel, tl.sum(total, 0), mask=known)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tl.program_id(1), 1, sem="acq_rel")
    if arrived == num_parts - 1:
        tl.store(arrivals + tl.program_id(1), 0)
        summed = tl.zeros((PARTS, CHANNELS), tl.float32)
        for first in range(0, num_parts, PARTS):
            other = first + tl.arange(0, PARTS)
            there = (other < num_parts)[:, None] & known[None, :]
            summed += tl.load(partial + other[:, None] * NUM_CHANNELS + channel[None, :], mask=there, other=0.0)
        tl.store(bias_grad + channel, tl.sum(summed, 0), mask=known)


def bias_relu_backward(g: torch.Tensor, z: torch.Tensor, *, in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(g where z > 0 else 0, its sums per channel in float32). `in_place` writes the first into g, which has to be in rows."""
    if g.shape != z.shape:
        raise ValueError(f"the gradient has shape {tuple(g.shape)}, the activation {tuple(z.shape)}: they have to be the same")
    rows = as_rows(g)
    if in_place and rows.data_ptr() != g.data_ptr():
        raise ValueError("only a contiguous matrix or maps in channels-last order can be changed in place")
    dy = rows if in_place else torch.empty_like(rows)
    return dy, _launch(rows, as_rows(z), dy)


def bias_gradient(g: torch.Tensor) -> torch.Tensor:
    """The sums of g per channel, in float32."""
    rows = as_rows(g)
    return _launch(rows, None, rows)


def _launch(g: torch.Tensor, z: torch.Tensor | None, dy: torch.Tensor) -> torch.Tensor:
    channels = g.shape[1]
    rows = g.numel() // channels
    out = torch.empty(channels, dtype=torch.float32, device=g.device)
    # 64 channels are 128 bytes of bf16: whole lines of the cache; a tile of 4,096 is 16 bytes for each of 256 threads, twice. Four
    # programs of 8 warps to a multiprocessor keep 2 × 32 KB in flight, and the last program has few sums to add up.
    block = min(triton.next_power_of_2(channels), 64)
    tile = 4096 // block
    num_blocks = triton.cdiv(channels, block)
    each, parts = divide_rows(rows, tile, max(4 * WORKSPACE.processors(g.device) // num_blocks, 1))
    bias_kernel[(parts, num_blocks)](
        g,
        g if z is None else z,
        dy,
        WORKSPACE.partials(g.device, parts * channels),
        WORKSPACE.arrivals(g.device, num_blocks),
        out,
        rows,
        each,
        parts,
        NUM_CHANNELS=channels,
        MASKS=z is not None,
        ROWS=tile,
        CHANNELS=block,
        PARTS=tile,
        num_warps=8,
    )
    return out
