import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepex.step.captured.kernels.mean import mean
from tests.step.captured.kernels.conftest import DEVICE


@given(
    shape=st.tuples(st.integers(1, 4), st.sampled_from([1, 8, 20]), st.integers(1, 7), st.integers(1, 7)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_the_bits_of_pytorchs_and_its_gradient_in_channels_last_order(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(shape).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    g = torch.randn(shape[0], shape[1], 1, 1).to(DEVICE, dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = mean(ours), nn.AdaptiveAvgPool2d(1)(theirs)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y, ours, g)
    assert torch.equal(gradient, *torch.autograd.grad(expected, theirs, g))
    assert gradient.is_contiguous(memory_format=torch.channels_last)
