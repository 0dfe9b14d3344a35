import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.step.captured.kernels.activation import bias_gradient, bias_relu_backward
from deepex.step.captured.kernels.division import divide_rows
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance, tolerance

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.one_of(
    st.tuples(st.integers(1, 200), st.integers(1, 150)),
    st.tuples(st.integers(1, 4), st.sampled_from([16, 48, 128]), st.integers(1, 9), st.integers(1, 9)),
)


def _maps(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


def _sums(g: torch.Tensor) -> torch.Tensor:
    return g.double().sum([d for d in range(g.dim()) if d != 1])


@settings(max_examples=examples(4, 12))
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 2**31), owned=st.booleans())
def test_gradients_behind_a_relu(shape: tuple[int, ...], dtype: torch.dtype, seed: int, owned: bool) -> None:
    g, z = _maps(shape, dtype, seed), _maps(shape, dtype, seed + 1).relu()
    expected = g.double() * (z > 0)
    dy, bias_grad = bias_relu_backward(g, z, owned=owned)
    assert dy.dtype == dtype
    assert (dy.data_ptr() == g.data_ptr()) == owned
    assert torch.equal(dy.double(), expected)
    assert distance(bias_grad, _sums(expected), least=1.0) < 1e-5


@settings(max_examples=examples(4, 15))
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 2**31))
def test_gradient_of_a_bias_alone(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    g = _maps(shape, dtype, seed)
    before = g.clone()
    assert distance(bias_gradient(g), _sums(g), least=1.0) < tolerance(torch.float32)
    assert torch.equal(g, before)


@pytest.mark.parametrize("dims", [2, 4])
def test_a_slice_of_wider_maps(dims: int) -> None:
    wide = _maps((4, 64, 5, 3)[:dims], torch.float32, 1)
    g = wide[:, 16:48]
    z = _maps(tuple(g.shape), torch.float32, 2)
    dy, bias_grad = bias_relu_backward(g, z, owned=True)
    assert torch.equal(dy, g * (z > 0))
    assert dy.data_ptr() != g.data_ptr(), "a slice is not replaced"
    assert dy.stride() == z.stride()
    assert distance(bias_grad, _sums(dy), least=1.0) < 1e-5
    assert distance(bias_gradient(g), _sums(g), least=1.0) < 1e-5


def test_maps_in_another_order_are_reordered() -> None:
    g, z = torch.randn(2, 16, 3, 5, device=DEVICE), torch.randn(2, 16, 3, 5, device=DEVICE)
    dy, bias_grad = bias_relu_backward(g, z)
    assert torch.equal(dy, g * (z > 0))
    assert distance(bias_grad, _sums(dy), least=1.0) < 1e-5


def test_the_same_bits_in_every_run() -> None:
    g, z = _maps((3, 48, 17, 13), torch.float32, 1), _maps((3, 48, 17, 13), torch.float32, 2)
    first = bias_relu_backward(g, z)[1]
    assert all(torch.equal(bias_relu_backward(g, z)[1], first) for _ in range(3))


@given(rows=st.integers(1, 10_000), block=st.sampled_from([16, 64]), parts=st.integers(1, 600))
def test_every_program_has_rows_and_every_row_a_program(rows: int, block: int, parts: int) -> None:
    each, used = divide_rows(rows, block, parts)
    assert each % block == 0
    assert used <= parts
    assert (used - 1) * each < rows <= used * each
