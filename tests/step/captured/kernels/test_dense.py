import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.step.captured import linear_ops as product
from deepex.step.captured.kernels.dense import dense_weight_gradient, is_small
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance, randn

BF16 = torch.bfloat16


@settings(max_examples=examples(4, 12))
@given(
    n=st.sampled_from([1, 32, 63, 130]),
    outputs=st.sampled_from([1, 3, 27, 64, 70]),
    inputs=st.sampled_from([3, 64, 100]),
    seed=st.integers(0, 2**31),
)
def test_like_float64(n: int, outputs: int, inputs: int, seed: int) -> None:
    g, x = randn(n, outputs, seed=seed), randn(n, inputs, seed=seed + 1)
    assert is_small(g, x)
    found = dense_weight_gradient(g, x)
    assert found.dtype == torch.float32
    assert distance(found, g.double().cpu().t() @ x.double().cpu(), least=1.0) < 1e-5


@pytest.mark.parametrize(
    ("g", "x", "dtype"),
    [((4, 8), (4, 8), torch.float32), ((128, 8), (128, 4096), BF16), ((4096, 3), (4096, 3), BF16)],
)
def test_what_is_left_to_the_library(g: tuple[int, int], x: tuple[int, int], dtype: torch.dtype) -> None:
    assert not is_small(torch.empty(g, dtype=dtype), torch.empty(x, dtype=dtype))


@pytest.mark.parametrize("small", [True, False])
def test_a_dense_layer_of_either_size(monkeypatch: pytest.MonkeyPatch, *, small: bool) -> None:
    monkeypatch.setattr(product, "is_small", lambda g, x: small and is_small(g, x))
    x, weight, bias = randn(40, 20, seed=0), randn(27, 20, seed=1).requires_grad_(), randn(27, seed=2).requires_grad_()
    lane = product.Lane(torch.device(DEVICE))
    g = randn(40, 27, seed=3)
    product.dense(x, weight, bias, relu=False, lane=lane).backward(g)
    lane.join()
    gradient = lane.gradient(weight)
    assert gradient is not None
    assert gradient.dtype == (torch.float32 if small else BF16)
    assert distance(gradient, g.double().cpu().t() @ x.double().cpu(), least=1.0) < (1e-5 if small else 1e-2)
