import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from deepex.step.captured.kernels.folded import can_be_folded, folded_forward, folded_weight_gradient
from deepex.step.captured.linear_ops import ConvolutionShape, Lane, convolve
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance, randn, tolerance

BF16 = torch.bfloat16


@settings(max_examples=examples(2, 6))  # every size is compiled anew on a GPU
@given(
    window=st.sampled_from([(8, 2), (8, 4), (16, 2), (16, 4)]),
    wide=st.sampled_from([8, 16, 24, 64, 128]),
    maps=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_convolution_and_its_weights_gradient(
    window: tuple[int, int], wide: int, maps: tuple[int, int, int], bias: bool, seed: int
) -> None:
    (few, side), (n, lines, columns) = window, maps
    x, weight = randn(n, few, lines + side - 1, columns + side - 1, seed=seed), randn(wide, few, side, side, seed=seed + 1)
    shift = randn(wide, seed=seed + 2) if bias else None
    assert can_be_folded(x, weight)
    out = folded_forward(x, weight, shift)
    assert out.is_contiguous(memory_format=torch.channels_last)
    exact = weight.double().cpu().requires_grad_()
    reference = functional.conv2d(x.double().cpu(), exact, None if shift is None else shift.double().cpu())
    assert out.shape == reference.shape
    assert distance(out, reference.detach(), least=1.0) < tolerance(BF16)
    g = randn(*out.shape, seed=seed + 3)
    reference.backward(g.double().cpu())
    assert exact.grad is not None
    assert distance(folded_weight_gradient(g, x, side), exact.grad, least=1.0) < 1e-5


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ((1, 8, 9, 9), (16, 8, 3, 3)),  # 72 taps are no power of two
        ((1, 4, 9, 9), (16, 4, 4, 4)),  # rows of pixels that are no whole vectors
        ((1, 32, 9, 9), (16, 32, 4, 4)),  # more taps than a program's memory has room for
        ((1, 64, 9, 9), (64, 64, 1, 1)),  # a plain product, which libraries do well
        ((1, 8, 9, 9), (256, 8, 2, 2)),
        ((1, 8, 9, 9), (16, 8, 2, 4)),
    ],
)
def test_what_is_not_for_these_kernels(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    assert not can_be_folded(torch.empty(x, dtype=BF16), torch.empty(weight, dtype=BF16))


def test_other_precisions_are_not_either() -> None:
    assert not can_be_folded(torch.empty(1, 8, 9, 9), torch.empty(16, 8, 4, 4))


@pytest.mark.parametrize("padding", [0, 1])
def test_a_convolution_that_is_learnt(padding: int) -> None:
    """As part of a network, with the gradients of everything; padded, it is left to the library."""
    x, weight, bias = randn(2, 8, 6, 7, seed=1).requires_grad_(), randn(16, 8, 4, 4, seed=2), randn(16, seed=3)
    weight, bias, lane = weight.requires_grad_(), bias.requires_grad_(), Lane(torch.device(DEVICE))
    out = convolve(x, weight, bias, ConvolutionShape(stride=(1, 1), padding=(padding, padding)), relu=False, lane=lane)
    assert out.grad_fn is not None
    assert out.grad_fn.folded == (padding == 0)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (x, weight, bias)]
    reference = functional.conv2d(*exact, padding=padding)
    assert distance(out.detach(), reference.detach(), least=1.0) < tolerance(BF16)
    g = randn(*out.shape, seed=4)
    out.backward(g)
    lane.join()
    reference.backward(g.double().cpu())
    for found, tensor in zip((x.grad, lane.gradient(weight), lane.gradient(bias)), exact, strict=True):
        assert found is not None
        assert tensor.grad is not None
        assert distance(found.detach(), tensor.grad, least=1.0) < tolerance(BF16)
