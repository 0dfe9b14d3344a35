"""One step of training for each kind of network, on real numbers: at its minimum size, a ResNet at 64×64."""

import pytest
import torch
from torch import Tensor, nn

from deepex.nets import build, networks

# A batch norm over two numbers gives ±1 whatever they are, and multiplies gradients by up to 1/√ε: through 50 of them
# they overflow. That is arithmetic, not a fault, so the ResNets get images whose last maps are 2×2.
SIZES = {f"resnet{depth}": (64, 64) for depth in (18, 34, 50, 101, 152)}


def loss(net: nn.Module, x: Tensor, *, bf16: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out = net(x)
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(output.dtype == (torch.bfloat16 if bf16 else torch.float32) for output in outputs)
    return sum((output.float().square().mean() for output in outputs), torch.zeros(()))


def assert_gradients(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


# These have the blocks of their siblings, and their weights take long to draw.
SIBLINGS = {"vgg13", "vgg16", "vgg19", "resnet34", "resnet101"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(networks()) - SIBLINGS))
def test_a_step_gives_finite_gradients(name: str, least: dict[str, int]) -> None:
    size = SIZES.get(name, (least[name], least[name]))
    net = build(name, channels=1, size=size, classes=3).to(memory_format=torch.channels_last)
    x = torch.rand(2, 1, *size).to(memory_format=torch.channels_last)
    for bf16 in (False, True):
        net.zero_grad()
        loss(net, x, bf16=bf16).backward()
        assert_gradients(net)


@pytest.mark.parametrize("name", ["lenet", "convnet-full", "googlenet", "resnet18", "cvae", "alexnet"])
def test_memory_format_changes_nothing(name: str, least: dict[str, int]) -> None:
    size = (least[name] + 4, least[name] + 9)
    options = {"filters": 8} if name == "cvae" else {}
    net = build(name, channels=3, size=size, classes=3, **options).eval()
    x = torch.rand(2, 3, *size)
    with torch.no_grad():
        plain = net(x)
        last = net.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, plain)


def test_a_larger_map_is_pooled_and_trains() -> None:
    """Maps beyond the published 6×6 take the average pooling, whose gradient the minimum size does not see."""
    net = build("alexnet", channels=1, size=(260, 64), classes=2)
    loss(net, torch.rand(2, 1, 260, 64), bf16=False).backward()
    assert_gradients(net)


def test_batch_norm_of_vgg_trains() -> None:
    net = build("vgg11", channels=1, size=(32, 32), classes=2, batch_norm=True)
    loss(net, torch.rand(2, 1, 32, 32), bf16=False).backward()
    assert_gradients(net)
