import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepex.errors import ConfigError
from deepex.nets import build, networks
from deepex.nets.geometry import grid, minimum
from tests.full import examples


def logits_shape(name: str, channels: int, size: tuple[int, int], classes: int) -> torch.Size:
    with torch.device("meta"):
        out = build(name, channels=channels, size=size, classes=classes)(torch.empty(2, channels, *size))
    return (out[0] if isinstance(out, tuple) else out).shape


def test_every_network_has_its_minimum_stated(least: dict[str, int]) -> None:
    assert set(least) == set(networks())


@pytest.mark.parametrize("name", networks())
def test_the_minimum_works_and_one_less_raises(name: str, least: dict[str, int]) -> None:
    extent = least[name]
    expected = (2, 1, extent, extent) if name == "cvae" else (2, 7)
    assert logits_shape(name, 1, (extent, extent), 7) == expected
    for height, width in ((extent - 1, extent), (extent, extent - 1)):
        stated = f"{name} got images of {height}×{width} .* at least {extent}×{extent}: .*resnet18"
        with torch.device("meta"), pytest.raises(ConfigError, match=stated if extent > 1 else name):
            build(name, channels=1, size=(height, width), classes=7)


# Deeper ResNets and VGGs have the windows of the shallow ones; the next test has them all.
@pytest.mark.parametrize(
    "name", ["lenet", "lenet-caffe", "convnet", "convnet-full", "alexnet", "caffenet", "vgg11", "googlenet", "resnet18"]
)
@settings(max_examples=5, deadline=None)
@given(channels=st.integers(1, 4), more=st.tuples(st.integers(0, 90), st.integers(0, 90)), classes=st.integers(1, 30))
def test_any_channels_size_and_classes(
    name: str, channels: int, more: tuple[int, int], classes: int, least: dict[str, int]
) -> None:
    size = (least[name] + more[0], least[name] + more[1])
    assert logits_shape(name, channels, size, classes) == (2, classes)


@pytest.mark.parametrize("name", networks())
def test_the_atom_images_fit_every_network(name: str) -> None:
    assert logits_shape(name, 1, (120, 85), 27) == ((2, 1, 120, 85) if name == "cvae" else (2, 27))


@st.composite
def windows(draw: st.DrawFn) -> nn.Module:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    padding = draw(st.integers(0, kernel // 2))
    kind = draw(st.sampled_from([nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d]))
    if kind is nn.Conv2d:
        return nn.Conv2d(1, 1, kernel, stride, padding)
    return kind(kernel, stride, padding, ceil_mode=draw(st.booleans()))


@settings(max_examples=examples(37, 150), deadline=None)
@given(chain=st.lists(windows(), min_size=1, max_size=5), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_grid_is_what_pytorch_computes(chain: list[nn.Module], size: tuple[int, int]) -> None:
    features = nn.Sequential(*chain)
    image = torch.zeros(1, 1, *size)
    try:
        expected = tuple(features(image).shape[2:])
    except RuntimeError:
        with pytest.raises(ConfigError, match="needs at least"):
            grid("net", features, size)
        assert minimum(features)[0] > min(size)
    else:
        assert grid("net", features, size) == expected
