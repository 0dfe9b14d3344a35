"""Dropout: how often it drops, that backwards drops the same, and that keys and salts draw different masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepex.step.captured.kernels.dropout import Dropout
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE


def a_key(value: int = 7) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=DEVICE)


def mask(key: int, salt: int, count: int = 5000, p: float = 0.5) -> Tensor:
    return Dropout.apply(torch.ones(count, device=DEVICE), p, a_key(key), salt) > 0


@settings(max_examples=examples(4, 15))
@given(
    st.integers(1, 9000),
    st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**31 - 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_share_of_zeros_is_binomial_and_the_rest_is_scaled(count: int, p: float, key: int, salt: int, dtype: torch.dtype) -> None:
    y = Dropout.apply(torch.full((count,), 3.0, dtype=dtype, device=DEVICE), p, a_key(key), salt).double()
    zeros = int((y == 0).sum())
    assert abs(zeros - count * p) <= 6 * (count * p * (1 - p)) ** 0.5 + 1e-9 + (6 if 0 < p < 1 else 0)
    kept = y[y != 0]
    assert torch.allclose(kept, torch.full_like(kept, 3 / (1 - p) if p < 1 else 0), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@settings(max_examples=examples(4, 15))
@given(st.integers(1, 5000), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_backwards_drops_what_forwards_dropped(count: int, relu: bool, key: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    x = (torch.randn(count, generator=generator).to(dtype) + 0).to(DEVICE).requires_grad_()
    y = Dropout.apply(x, 0.5, a_key(key), 3, relu)
    g = torch.randn(count, generator=generator).to(dtype).to(DEVICE)
    y.backward(g)
    passed = y.detach() != 0
    inner = x.detach().relu() if relu else x.detach()
    assert torch.equal(y.detach(), torch.where(passed, inner * 2, 0))
    assert torch.equal(x.grad, torch.where(passed, g * 2, 0))


def test_keys_and_salts_draw_masks_of_their_own() -> None:
    masks = [mask(0, 0), mask(1, 0), mask(0, 1), mask(1, 1), mask(2**32, 0), mask(-1, 0)]
    assert torch.equal(masks[0], mask(0, 0))
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((one == other).double().mean()) - 0.5) < 0.05
        stretches = one[:4096].reshape(-1, 512)  # no two stretches share a word
        for j in range(1, len(stretches)):
            assert abs(float((stretches[j] == stretches[0]).double().mean()) - 0.5) < 0.15


def test_a_mask_begins_the_same_whatever_follows() -> None:
    assert torch.equal(mask(5, 2, count=5000)[:1000], mask(5, 2, count=1000))


def test_maps_keep_their_order_and_a_gradient_in_another_is_reordered() -> None:
    x = torch.randn(2, 5, 3, 4, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = Dropout.apply(x, 0.5, a_key(), 0)
    assert y.stride() == x.stride()
    y.backward(torch.ones(2, 5, 3, 4, device=DEVICE))
    assert torch.equal(x.grad != 0, y.detach() != 0)


def test_views_with_holes_are_taken() -> None:
    x = torch.randn(6, 10, device=DEVICE)[:, ::2].requires_grad_()
    x.retain_grad()
    y = Dropout.apply(x, 0.5, a_key(), 0, True)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y.detach() != 0)


@pytest.mark.parametrize(("p", "salt"), [(-0.1, 0), (1.1, 0), (0.5, -1), (0.5, 2**31)])
def test_what_cannot_be_is_refused(p: float, salt: int) -> None:
    with pytest.raises(ValueError, match="dropout"):
        Dropout.apply(torch.ones(3, device=DEVICE), p, a_key(), salt)
