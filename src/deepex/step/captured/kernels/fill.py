"""Fills memory with one number."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def fill_kernel(out, value, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), value, out.dtype.element_ty), mask=at < count)


def fill(out: torch.Tensor, value: int) -> None:
    """Set every element of a dense tensor of whole numbers."""
    fill_kernel[(triton.cdiv(out.numel(), _BLOCK),)](out, value, out.numel(), _BLOCK, num_warps=4)
