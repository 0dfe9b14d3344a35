"""The response kernels against the module of deepex.nets in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepex.nets import response
from deepex.step.captured.kernels.response import LocalResponse
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(shape: tuple[int, ...], size: int, constants: tuple[float, float, float], dtype: torch.dtype) -> None:
    alpha, beta, k = constants
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
    exact = x.double().requires_grad_()
    expected = response.LocalResponse(size, alpha=alpha, beta=beta, k=k)(exact)
    expected.backward(g.double())
    ours = x.to(DEVICE).requires_grad_()
    y = LocalResponse.apply(ours, size, alpha, beta, k)
    y.backward(g.to(DEVICE))
    assert y.dtype == ours.grad.dtype == dtype
    assert distance(y.detach(), expected.detach()) < BOUND[dtype]
    through = float((g.double() * expected / exact).detach().norm())  # a part of the gradient, which the rest may cancel
    assert distance(ours.grad, exact.grad, least=through) < BOUND[dtype]


@settings(max_examples=examples(4, 12))
@given(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 7, 32, 96, 130]), st.integers(1, 6), st.integers(1, 6)),
    st.integers(1, 7),
    st.tuples(st.sampled_from([1e-4, 1.0, 5.0]), st.sampled_from([0.75, 0.5, 1.0]), st.sampled_from([1.0, 2.0])),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@example((2, 96, 5, 7), 5, (1e-4, 0.75, 2.0), torch.bfloat16)
@example((1, 1, 1, 1), 6, (5.0, 1.0, 2.0), torch.float32)  # a gradient that nearly vanishes
def test_response_and_its_gradient(
    shape: tuple[int, ...], size: int, constants: tuple[float, float, float], dtype: torch.dtype
) -> None:
    check(shape, size, constants, dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_windows_of_even_sizes_lean_to_lower_channels_and_back(size: int) -> None:
    check((1, 9, 2, 3), size, (50.0, 0.75, 0.1), torch.float32)  # windows that matter much


def test_other_orders_of_memory_are_taken() -> None:
    x = torch.randn(2, 6, 3, 4, device=DEVICE)
    y = LocalResponse.apply(x, 5, 1.0, 0.75, 1.0)
    assert distance(y, response.LocalResponse(5, alpha=1.0)(x.double().cpu())) < 1e-5
