"""Dropout whose mask is never in memory: a counter-based generator makes it from a key on the device, forwards and again backwards.

    Dropout.apply(x, 0.5, key, salt)        # key: one int64 on the device, another one in every step
    Dropout.apply(x, 0.5, key, salt, True)  # dropout(relu(x))

Philox (Salmon et al. 2011) maps (key, salt, position) to random words, so that a captured graph draws new masks once the key has
changed, and the dropouts of a network differ by their salts. One call gives four words, for four stretches of elements; the
position is that in memory.
"""

from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 512  # elements per random word; part of what a mask means, so it may not depend on sizes


@triton.jit
def _keep(x, out, at, word, num_elements, p, scale, RELU: tl.constexpr):
    inside = at < num_elements
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0.0, 0.0, value)
    kept = tl.where(tl.uint_to_uniform_float(word) >= p, value * scale, 0.0)
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dropout_kernel(x, out, key, salt, num_elements, p, scale, RELU: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    counter = tl.program_id(0) * BLOCK + lane
    zero = counter * 0
    word0, word1, word2, word3 = tl.philox(tl.load(key), counter, zero, zero + salt, zero)
    at = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + lane
    _keep(x, out, at, word0, num_elements, p, scale, RELU)
    _keep(x, out, at + BLOCK, word1, num_elements, p, scale, RELU)
    _keep(x, out, at + 2 * BLOCK, word2, num_elements, p, scale, RELU)
    _keep(x, out, at + 3 * BLOCK, word3, num_elements, p, scale, RELU)


@triton.jit
def dropped_relu_gradient_kernel(g, out, dx, num_elements, scale, BLOCK: tl.constexpr):
    """What came out above zero was kept and positive: its sign is the mask."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    passed = tl.load(out + at, mask=inside, other=0.0) > 0.0
    tl.store(dx + at, tl.where(passed, gradient * scale, 0.0).to(dx.dtype.element_ty), mask=inside)


@final
class Dropout(torch.autograd.Function):
    """Zeros with probability p, what remains divided by 1 − p. With relu its output is kept for the backward pass, else nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, salt: int, relu: bool = False) -> Tensor:
        """Return x, or relu(x), with a share p of its elements dropped."""
        if not (0 <= p <= 1 and 0 <= salt < 2**31):
            raise ValueError(f"dropout with p={p} and salt={salt}: p must lie in 0…1, salt in 0…2³¹−1")
        x = _dense(x)
        out = torch.empty_like(x)
        _drop(x, out, p, key, salt, relu)
        ctx.p, ctx.salt, ctx.relu = p, salt, relu
        ctx.layout = x.shape, x.stride()
        ctx.save_for_backward(key, *([out] if relu else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of x. The key must be what it was forwards."""
        key, *outs = ctx.saved_tensors
        shape, stride = ctx.layout
        if g.stride() != stride:  # the mask goes by positions in memory
            g = torch.empty_strided(shape, stride, dtype=g.dtype, device=g.device).copy_(g)
        dx = torch.empty_strided(shape, stride, dtype=g.dtype, device=g.device)
        if ctx.relu:
            # 2048 elements by 4 warps: two 16-byte loads per thread and map.
            grid = (triton.cdiv(g.numel(), 2048),)
            dropped_relu_gradient_kernel[grid](g, outs[0], dx, g.numel(), _scale(ctx.p), BLOCK=2048, num_warps=4)
        else:
            _drop(g, dx, ctx.p, key, ctx.salt, relu=False)
        return dx, None, None, None, None


def _drop(x: Tensor, out: Tensor, p: float, key: Tensor, salt: int, relu: bool) -> None:
    # Four stretches of 512 elements by 2 warps: four 16-byte loads per thread, independent of the generator's arithmetic.
    grid = (triton.cdiv(x.numel(), 4 * _BLOCK),)
    dropout_kernel[grid](x, out, key, salt, x.numel(), float(p), _scale(p), RELU=relu, BLOCK=_BLOCK, num_warps=2)


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _dense(x: Tensor) -> Tensor:
    """Return x in an order of memory without holes: its own, if it has one."""
    return x if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
