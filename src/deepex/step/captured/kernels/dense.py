"""The weight's gradient of small dense layers.

    dw = dense_weight_gradient(g, x)      # gᵀ · x: (n, outputs), (n, inputs) → (outputs, inputs), in float32

Libraries want a workspace of tens of megabytes for each stream that they run on, and whole vectors in each row: 27 outputs take
them twice as long as 32. A product that is over in some microseconds needs neither.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from deepex.step.captured.kernels.division import tile
from deepex.step.captured.kernels.thin_kernel import multiply

_MOST_ELEMENTS: Final = 1 << 19  # of both factors
_MOST_ROWS: Final = 2048  # a program adds all of them up
_ROWS: Final = 64  # of a tile
_INPUTS: Final = 64


@triton.jit
def dense_gradient_kernel(
    g, x, out, num_rows, num_outputs, num_inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, output, num_rows, num_outputs)
        gradient = tl.load(g + at, mask=inside, other=0.0)
        at, inside = tile(row, place, num_rows, num_inputs)
        total = multiply(tl.trans(gradient), tl.load(x + at, mask=inside, other=0.0), total)
    at, inside = tile(output, place, num_outputs, num_inputs)
    tl.store(out + at, total, mask=inside)


def is_small(g: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the kernel is for this product; it is for bf16, which sets no other precision's pace."""
    few = len(x) <= _MOST_ROWS and g.numel() + x.numel() <= _MOST_ELEMENTS
    return few and g.dtype == x.dtype == torch.bfloat16


def dense_weight_gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """From the gradient of the outputs and the inputs."""
    g, x = g.contiguous(), x.contiguous()
    outputs, inputs = g.shape[1], x.shape[1]
    out = torch.empty((outputs, inputs), device=x.device)
    width = min(max(triton.next_power_of_2(outputs), 16), 64)
    grid = (triton.cdiv(outputs, width), triton.cdiv(inputs, _INPUTS))
    dense_gradient_kernel[grid](g, x, out, len(x), outputs, inputs, _ROWS, width, _INPUTS, num_warps=4)
    return out
