"""Residual networks of 18, 34, 50, 101 and 152 layers (He 2015).

>>> net = resnet18(channels=3, size=(32, 32), classes=1000)
>>> sum(parameter.numel() for parameter in net.parameters())
11689512
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from deepex.nets.geometry import Size, check
from deepex.nets.initialise import initialise

_WIDTHS = (64, 128, 256, 512)


@final
class Add(nn.Module):
    """The DeepEx paper's AddLayer: joins the source of a shortcut with its destination, and activates the sum.

    Where the two differ in channels or stride, the source first passes a 1×1 convolution and a batch norm of the
    layer's own (He's projection, option B); elsewhere it passes unchanged.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.outputs = outputs
        same = inputs == outputs and stride == 1
        self.projection = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, source: Tensor, destination: Tensor) -> Tensor:
        """Return relu(destination + projection(source))."""
        return functional.relu(destination + self.projection(source), inplace=True)


@final
class Residual(nn.Module):
    """A chain of layers `main`, with a shortcut from its input to an Add layer behind it."""

    def __init__(self, main: nn.Module, add: Add) -> None:
        super().__init__()
        self.main = main
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        """Return add(x, main(x))."""
        out: Tensor = self.add(x, self.main(x))
        return out


@final
class ResNet(nn.Sequential):
    """A chain of named stages, whose own initialisation is He's (2015, "Delving deep into rectifiers")."""

    initialiser = "he"


def resnet18(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return 18 layers of basic blocks: 11,689,512 parameters at 3 channels and 1,000 classes."""
    return _resnet("resnet18", _basic, (2, 2, 2, 2), channels=channels, size=size, classes=classes)


def resnet34(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return 34 layers of basic blocks: 21,797,672 parameters at 3 channels and 1,000 classes."""
    return _resnet("resnet34", _basic, (3, 4, 6, 3), channels=channels, size=size, classes=classes)


def resnet50(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return 50 layers of bottlenecks: 25,557,032 parameters at 3 channels, 1,000 classes; 23,557,083 at 1 and 27."""
    return _resnet("resnet50", _bottleneck, (3, 4, 6, 3), channels=channels, size=size, classes=classes)


def resnet101(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return 101 layers of bottlenecks: 44,549,160 parameters at 3 channels and 1,000 classes."""
    return _resnet("resnet101", _bottleneck, (3, 4, 23, 3), channels=channels, size=size, classes=classes)


def resnet152(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return 152 layers of bottlenecks: 60,192,808 parameters at 3 channels and 1,000 classes."""
    return _resnet("resnet152", _bottleneck, (3, 8, 36, 3), channels=channels, size=size, classes=classes)


_Block = Callable[[int, int, int], Residual]


def _resnet(name: str, block: _Block, depths: tuple[int, ...], *, channels: int, size: Size, classes: int) -> nn.Module:
    """Return stem, four stages of `depths` blocks, average, dense layer. Every window is padded, so any size fits."""
    check(name, channels=channels, size=size, classes=classes)
    stem = nn.Sequential(*_convolution(channels, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    stages = nn.Sequential()
    inputs = 64
    for number, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True)):
        stage = nn.Sequential()
        for position in range(depth):
            stride = 2 if number > 0 and position == 0 else 1
            residual = block(inputs, width, stride)
            stage.append(residual)
            inputs = residual.add.outputs
        stages.append(stage)
    net = ResNet(
        OrderedDict(
            stem=stem,
            stages=stages,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(inputs, classes),
        )
    )
    initialise(net, "default")
    return net


def _basic(inputs: int, width: int, stride: int) -> Residual:
    """Return two 3×3 convolutions with a shortcut around them."""
    main = nn.Sequential(
        *(*_convolution(inputs, width, 3, stride), nn.ReLU(inplace=True)),
        *_convolution(width, width, 3, 1),
    )
    return Residual(main, Add(inputs, width, stride))


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Return 1×1, 3×3, 1×1 convolutions with a shortcut; the 3×3 has the stride (version 1.5): no input is skipped."""
    main = nn.Sequential(
        *(*_convolution(inputs, width, 1, 1), nn.ReLU(inplace=True)),
        *(*_convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
        *_convolution(width, 4 * width, 1, 1),
    )
    return Residual(main, Add(inputs, 4 * width, stride))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """Return a convolution and its batch norm; the norm's shift makes a bias useless."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
