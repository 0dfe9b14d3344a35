import pytest
import torch
from torch import nn

from deepex.nets.response import LocalResponse


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [1.0, 2.0])
def test_across_channels_equals_pytorch(size: int, k: float) -> None:
    x = torch.randn(2, 7, 4, 3, dtype=torch.float64)
    ours, theirs = LocalResponse(size, alpha=0.3, beta=0.6, k=k), nn.LocalResponseNorm(size, 0.3, 0.6, k)
    torch.testing.assert_close(ours(x), theirs(x))


def test_within_a_channel_equals_the_formula() -> None:
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    out = LocalResponse(3, alpha=0.3, region="within")(x)
    inner, corner = x[0, 1, 0:3, 1:4], x[0, 1, 0:2, 0:2]
    assert out[0, 1, 1, 2].item() == pytest.approx((x[0, 1, 1, 2] * (1 + 0.3 * inner.square().sum() / 9) ** -0.75).item())
    assert out[0, 1, 0, 0].item() == pytest.approx((x[0, 1, 0, 0] * (1 + 0.3 * corner.square().sum() / 9) ** -0.75).item())


@pytest.mark.parametrize("region", ["across", "within"])
def test_half_precision_is_rounded_only_at_the_end(region: str) -> None:
    x = (5 * torch.randn(2, 8, 4, 4)).bfloat16()
    norm = LocalResponse(5, alpha=1e-4, region=region)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


@pytest.mark.parametrize("region", ["across", "within"])
def test_gradient(region: str) -> None:
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LocalResponse(3, alpha=0.5, region=region), (x,))
