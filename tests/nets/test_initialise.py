import math

import pytest
import torch
from torch import Tensor, nn

from deepex.errors import ConfigError, UnknownName
from deepex.nets import build
from deepex.nets.initialise import initialise, initialisers


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layers() -> nn.Sequential:
    """One layer of each kind that has weights, with different fans in and out, and a norm, which must stay."""
    return nn.Sequential(
        nn.Conv2d(32, 64, 3, groups=2), nn.ConvTranspose2d(64, 32, 5, stride=2), nn.BatchNorm2d(32), nn.Linear(300, 200)
    )


# Weights into one output and out of one input, counted by hand from `layers`.
FANS = {0: (16 * 9, 32 * 9), 1: (64 * 25, 32 * 25), 3: (300, 200)}


def assert_normal(weight: Tensor, deviation: float) -> None:
    """Five standard errors around mean and deviation, and the normal share within one deviation."""
    error = 5 / math.sqrt(weight.numel())
    assert abs(weight.mean().item()) < error * deviation
    assert weight.std().item() == pytest.approx(deviation, rel=error / math.sqrt(2))
    assert (weight.abs() < deviation).float().mean().item() == pytest.approx(0.6827, abs=error / 2)


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Nothing beyond the bound, something near it, and the deviation of a uniform distribution."""
    error = 5 / math.sqrt(weight.numel())
    assert 0.99 * bound < weight.abs().max().item() <= bound * (1 + 1e-6)
    assert abs(weight.mean().item()) < error * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=error)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_moments(layer: int) -> None:
    fan_in, fan_out = FANS[layer]

    def weight(how: str, **options: float) -> Tensor:
        return initialise(layers(), how, seeded(), **options)[layer].weight.detach()

    assert_normal(weight("gaussian"), 0.01)
    assert_normal(weight("gaussian", scale=0.3), 0.3)
    assert_uniform(weight("uniform"), 0.05)
    assert_uniform(weight("uniform", scale=0.2), 0.2)
    assert_uniform(weight("xavier"), math.sqrt(6 / (fan_in + fan_out)))
    assert_normal(weight("he"), math.sqrt(2 / fan_in))


@pytest.mark.parametrize("how", ["gaussian", "uniform", "xavier", "he"])
def test_biases_are_zero_and_norms_stay(how: str) -> None:
    net = initialise(layers(), how, seeded())
    for layer in FANS:
        assert not net[layer].bias.any()
    assert torch.equal(net[2].weight, torch.ones(32))
    assert torch.equal(net[2].bias, torch.zeros(32))


@pytest.mark.parametrize("how", initialisers())
def test_the_same_seed_gives_the_same_bits(how: str) -> None:
    first, second, other = (initialise(layers(), how, seeded(seed)) for seed in (5, 5, 6))
    last = initialise(layers().to(memory_format=torch.channels_last), how, seeded(5))
    for one, two, three in zip(first.parameters(), second.parameters(), last.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_a_generator_leaves_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    net = layers()
    torch.random.set_rng_state(before)
    initialise(net, "he", seeded())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_default_is_what_pytorch_draws() -> None:
    """Same numbers from the same global seed as when the layers were built, up to the rounding of the bound."""
    torch.manual_seed(11)
    net = layers()
    built = [parameter.detach().clone() for parameter in net.parameters()]
    torch.manual_seed(11)
    initialise(net, "default")
    for parameter, expected in zip(net.parameters(), built, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


def test_default_of_a_resnet_is_he() -> None:
    size = {"channels": 1, "size": (8, 8), "classes": 4}
    default = initialise(build("resnet18", **size), "default", seeded())
    he = initialise(build("resnet18", **size), "he", seeded())
    for one, two in zip(default.parameters(), he.parameters(), strict=True):
        assert torch.equal(one, two)


def test_unknown_name_and_misplaced_scale() -> None:
    with pytest.raises(UnknownName, match="unknown initialiser 'xaver'; did you mean xavier"):
        initialise(nn.Linear(2, 2), "xaver")
    with pytest.raises(ConfigError, match=r"initialiser 'he' got scale = 0.1; .*gaussian or uniform only"):
        initialise(nn.Linear(2, 2), "he", scale=0.1)
    with pytest.raises(ConfigError, match=r"'gaussian' got scale = -1"):
        initialise(nn.Linear(2, 2), "gaussian", scale=-1)
