"""Batch norm, shortcut and ReLU in one, against float64."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from deepex.step.captured.kernels import normalise as code
from deepex.step.captured.kernels.normalise import normalise, normalise_add
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30))


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.2)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_()
    return norm.to(DEVICE)


def _map(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> torch.Tensor:
    made = (torch.randn(shape) + mean).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().cpu().contiguous().requires_grad_()


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", ["none", "shortcut", "projection"])
@settings(max_examples=examples(2, 4))
@given(
    batch=st.integers(2, 3), channels=st.sampled_from([8, 20, 72]), size=st.sampled_from([(3, 5), (9, 7)]), relu=st.booleans(),
    users=st.integers(1, 2), owned=st.tuples(st.booleans(), st.booleans(), st.booleans()), seed=st.integers(0, 99),
)  # fmt: skip
def test_like_float64(*, dtype, second, small, batch, channels, size, relu, users, owned, seed) -> None:
    torch.manual_seed(seed)
    shape = (batch, channels, *size)
    norm, norm2 = _norm(channels), _norm(channels)
    exact, exact2 = (copy.deepcopy(n).double().cpu() for n in (norm, norm2))
    y, other = _map(shape, dtype, mean=3.0), _map(shape, dtype)
    ye, oe = _exact(y), _exact(other)
    before, places = code._is_small, []
    code._is_small = lambda *_: small
    try:
        if second == "none":
            outputs, expected = (normalise(y, norm, relu=relu, owned=owned[0]),), exact(ye)
        else:
            projection = norm2 if second == "projection" else None
            outputs = normalise_add(y, norm, other, projection, relu=relu, owned=owned)[:users]
            expected = exact(ye) + (exact2(oe) if second == "projection" else oe)
        assume(not relu or float(expected.detach().abs().min()) > 1e-5)  # float32 can tell every sign
        expected = expected.relu() if relu else expected
        gradients = [torch.randn(shape).to(DEVICE, dtype) for _ in outputs]
        y.register_hook(lambda dy: places.append(dy.data_ptr() == y.data_ptr()))
        torch.autograd.backward(outputs, gradients)
    finally:
        code._is_small = before
    expected.backward(sum(g.double().cpu() for g in gradients))
    bound = BOUNDS[dtype]
    assert places == [owned[0]]
    assert _off(outputs[0], expected.detach()) < bound
    assert _off(y.grad, ye.grad) < 3 * bound
    assert _off(norm.weight.grad, exact.weight.grad) < 3 * bound
    assert _off(norm.bias.grad, exact.bias.grad) < 3 * bound
    assert _off(norm.running_mean, exact.running_mean) < bound
    assert _off(norm.running_var, exact.running_var) < bound
    if second != "none":
        assert _off(other.grad, oe.grad) < 3 * bound
    if second == "projection":
        assert _off(norm2.weight.grad, exact2.weight.grad) < 3 * bound
        assert _off(norm2.running_var, exact2.running_var) < bound


def test_variance_survives_a_large_mean() -> None:
    """A sum of squares in float32 would lose it."""
    y = (torch.randn(64, 16, 8, 8) + 3000.0).to(DEVICE).contiguous(memory_format=torch.channels_last)
    norm = _norm(16)
    found = normalise(y, norm, relu=False)
    exact = nn.functional.batch_norm(y.double().cpu(), None, None, norm.weight.double().cpu(), norm.bias.double().cpu(), True)
    assert _off(found, exact.detach()) < 1e-3
