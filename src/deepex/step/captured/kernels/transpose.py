"""Weights in another order: (outer, rows, columns, inner) to (outer, columns, rows, inner) at the speed of memory, or any other.

Turn(outer=128, rows=channels, columns=points)(weight)      # a dense layer's columns, from (channels, points) to (points, channels)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x, out, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    base = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(x + base + row[:, None] * num_columns + column[None, :], mask=inside)
    tl.store(out + base + column[:, None] * num_rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def swap_kernel(x, out, num_rows, num_columns, num_inner, LINES: tl.constexpr, INNER: tl.constexpr):
    """The same for vectors of `num_inner` elements, which stay together."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inner = tl.arange(0, INNER)
    base = tl.program_id(1).to(tl.int64) * num_rows * num_columns * num_inner
    inside = (line < num_rows * num_columns)[:, None] & (inner < num_inner)[None, :]
    source = (line % num_rows) * num_columns + line // num_rows
    vectors = tl.load(x + base + source.to(tl.int64)[:, None] * num_inner + inner[None, :], mask=inside)
    tl.store(out + base + line.to(tl.int64)[:, None] * num_inner + inner[None, :], vectors, mask=inside)


@triton.jit
def gather_kernel(x, places, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < count, other=-1)
    value = tl.load(x + place, mask=place >= 0, other=0.0)
    tl.store(out + at, value, mask=at < count)


def gather(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[places] of vectors, with zero where the place is negative. `places` are int32."""
    out = torch.empty(places.shape, dtype=x.dtype, device=x.device)
    gather_kernel[(triton.cdiv(len(places), 1024),)](x, places, out, len(places), 1024)
    return out


@dataclass(frozen=True, kw_only=True)
class Transposition:
    """A dense tensor's memory with two of its dimensions exchanged; the shape of the tensor stays."""

    rows: int
    columns: int
    outer: int = 1
    inner: int = 1

    def __call__(self, weight: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """The weight, turned; in `room`, if there is any."""
        return _turn(weight, torch.empty_like(weight) if room is None else room, self.outer, self.rows, self.columns, self.inner)

    def back(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight, from that of the turned one."""
        dense = gradient.contiguous()
        return _turn(dense, torch.empty_like(dense), self.outer, self.columns, self.rows, self.inner).view(weight.shape)


def _turn(x: torch.Tensor, out: torch.Tensor, outer: int, rows: int, columns: int, inner: int) -> torch.Tensor:
    if inner == 1:
        grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 64), outer)
        transpose_kernel[grid](x, out, rows, columns, 64, 64, num_warps=4)
    else:
        wide = triton.next_power_of_2(inner)
        lines = max(1, 4096 // wide)
        swap_kernel[(triton.cdiv(rows * columns, lines), outer)](x, out, rows, columns, inner, lines, wide, num_warps=4)
    return out
