import pytest
import torch
from torch import nn

from deepex.nets import build
from deepex.nets.resnet import Add


def test_add_passes_the_source_unchanged_where_shapes_agree() -> None:
    source, destination = torch.randn(2, 8, 5, 3), torch.randn(2, 8, 5, 3)
    add = Add(8, 8, 1)
    assert not list(add.parameters())
    assert torch.equal(add(source, destination), torch.relu(source + destination))


@pytest.mark.parametrize(("outputs", "stride", "size"), [(16, 1, (5, 3)), (8, 2, (3, 2)), (16, 2, (3, 2))])
def test_add_projects_the_source_where_shapes_differ(outputs: int, stride: int, size: tuple[int, int]) -> None:
    add = Add(8, outputs, stride)
    assert [type(module) for module in add.projection] == [nn.Conv2d, nn.BatchNorm2d]
    assert add(torch.randn(2, 8, 5, 3), torch.randn(2, outputs, *size)).shape == (2, outputs, *size)


def test_add_hands_the_gradient_to_both_inputs() -> None:
    source, destination = torch.ones(1, 2, 1, 1, requires_grad=True), torch.ones(1, 2, 1, 1, requires_grad=True)
    Add(2, 2, 1)(source, destination).sum().backward()
    assert torch.equal(source.grad, torch.ones(1, 2, 1, 1))
    assert torch.equal(destination.grad, torch.ones(1, 2, 1, 1))


def test_the_stride_of_a_bottleneck_is_on_its_3x3() -> None:
    with torch.device("meta"):
        net = build("resnet50", channels=3, size=(224, 224), classes=10)
    strided = [module.kernel_size for module in net.stages.modules() if isinstance(module, nn.Conv2d) and module.stride == (2, 2)]
    assert sorted(strided) == [(1, 1)] * 3 + [(3, 3)] * 3


def test_initial_weights_are_he() -> None:
    net = build("resnet18", channels=3, size=(32, 32), classes=10)
    weight = net.stages[3][1].main[0].weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
