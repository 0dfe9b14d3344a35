"""Normal random numbers from a key on the device, which a captured step draws anew without the host.

    noise = noise_like(mean, key, salt)        # key: one int64 on the device, another one in every step

Philox maps (key, salt, position) to four words, and Box and Muller's formula each pair of these to two numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # part of what a position means, so it may not depend on sizes


@triton.jit
def noise_kernel(out, key, salt, num_elements, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    counter = tl.program_id(0) * BLOCK + lane
    zero = counter * 0
    word0, word1, word2, word3 = tl.philox(tl.load(key), counter, zero, zero + salt, zero)
    first, second = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(word0), tl.uint_to_uniform_float(word1))
    third, fourth = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(word2), tl.uint_to_uniform_float(word3))
    at = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + lane
    kind = out.dtype.element_ty
    tl.store(out + at, first.to(kind), mask=at < num_elements)
    tl.store(out + at + BLOCK, second.to(kind), mask=at + BLOCK < num_elements)
    tl.store(out + at + 2 * BLOCK, third.to(kind), mask=at + 2 * BLOCK < num_elements)
    tl.store(out + at + 3 * BLOCK, fourth.to(kind), mask=at + 3 * BLOCK < num_elements)


def noise_like(x: Tensor, key: Tensor, salt: int) -> Tensor:
    """Numbers of mean 0 and deviation 1, in the shape, dtype and order of memory of x."""
    out = torch.empty_like(x)  # dense, whatever x is
    noise_kernel[(triton.cdiv(out.numel(), 4 * _BLOCK),)](out, key, salt, out.numel(), BLOCK=_BLOCK, num_warps=2)
    return out
