"""Random numbers from a key: that they are normal, each key's and salt's own, and independent of their neighbours."""

import pytest
import torch
from torch import Tensor

from deepex.step.captured.kernels.noise import noise_like
from tests.step.captured.kernels.conftest import DEVICE


def draw(key: int, salt: int = 1, count: int = 20_000, dtype: torch.dtype = torch.float32) -> Tensor:
    where = torch.full((count,), float("nan"), dtype=dtype, device=DEVICE)
    return noise_like(where, torch.tensor([key], device=DEVICE), salt).double().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", [0, -1, 2**63 - 1])
def test_they_are_normal(key: int, dtype: torch.dtype) -> None:
    """The share of numbers below any bound is the normal distribution's: Kolmogorov and Smirnov's test, at one in a million."""
    found = draw(key, dtype=dtype).sort().values
    expected = torch.special.ndtr(found)
    shares = torch.arange(1, len(found) + 1).double() / len(found)
    rounding = 0.002 if dtype == torch.bfloat16 else 0.0
    assert float((shares - expected).abs().max()) < 2.7 / len(found) ** 0.5 + rounding
    assert 3.5 < float(found.abs().max()) < 6.0


def test_keys_salts_and_places_have_numbers_of_their_own() -> None:
    draws = [draw(0), draw(1), draw(0, salt=2), draw(2**32)]
    assert torch.equal(draws[0], draw(0))
    shifted = [draws[0].roll(by) for by in (1, 256, 512, 1024)]
    for one in (*draws[1:], *shifted):
        for left, right in ((draws[0], one), (draws[0].square(), one.square())):
            assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 0.035


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 147), (2, 3, 4, 5)])
def test_shapes_orders_and_the_end_of_memory(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=DEVICE).transpose(0, -1)
    noise = noise_like(x, torch.tensor([3], device=DEVICE), 1)
    assert noise.shape == x.shape
    assert noise.stride() == torch.empty_like(x).stride()
    flat = torch.empty(noise.numel() + 8, device=DEVICE).fill_(7.0)
    inner = flat[: noise.numel()]
    assert torch.equal(noise_like(inner, torch.tensor([3], device=DEVICE), 1), noise.as_strided(inner.shape, (1,)))
    assert len(noise.unique()) == noise.numel()
