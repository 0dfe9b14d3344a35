"""VGG with 11, 13, 16 or 19 layers (Simonyan and Zisserman 2014: configurations A, B, D and E).

>>> import torch
>>> with torch.device("meta"):
...     net = vgg16(channels=3, size=(224, 224), classes=1000)
>>> sum(parameter.numel() for parameter in net.parameters())
138357544
"""

from collections import OrderedDict

from torch import nn

from deepex.nets.classifier import wide_classifier
from deepex.nets.geometry import Size, check, grid, probability

_WIDTHS = (64, 128, 256, 512, 512)
_LARGEST = 7  # the published feature map is 7×7


def vgg11(*, channels: int, size: Size, classes: int, batch_norm: bool = False, dropout: float = 0.5) -> nn.Module:
    """Return configuration A: 132,863,336 parameters at 3×224×224 and 1,000 classes."""
    return _vgg("vgg11", (1, 1, 2, 2, 2), channels=channels, size=size, classes=classes, batch_norm=batch_norm, dropout=dropout)


def vgg13(*, channels: int, size: Size, classes: int, batch_norm: bool = False, dropout: float = 0.5) -> nn.Module:
    """Return configuration B: 133,047,848 parameters at 3×224×224 and 1,000 classes."""
    return _vgg("vgg13", (2, 2, 2, 2, 2), channels=channels, size=size, classes=classes, batch_norm=batch_norm, dropout=dropout)


def vgg16(*, channels: int, size: Size, classes: int, batch_norm: bool = False, dropout: float = 0.5) -> nn.Module:
    """Return configuration D: 138,357,544 parameters at 3×224×224 and 1,000 classes."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), channels=channels, size=size, classes=classes, batch_norm=batch_norm, dropout=dropout)


def vgg19(*, channels: int, size: Size, classes: int, batch_norm: bool = False, dropout: float = 0.5) -> nn.Module:
    """Return configuration E: 143,667,240 parameters at 3×224×224 and 1,000 classes."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), channels=channels, size=size, classes=classes, batch_norm=batch_norm, dropout=dropout)


def _vgg(
    name: str, depths: tuple[int, ...], *, channels: int, size: Size, classes: int, batch_norm: bool, dropout: float
) -> nn.Module:
    """Return five stages of `depths` 3×3 convolutions, each halved by pooling, and the wide classifier."""
    check(name, channels=channels, size=size, classes=classes)
    probability(name, dropout=dropout)
    features = nn.Sequential()
    inputs = channels
    for width, depth in zip(_WIDTHS, depths, strict=True):
        for _ in range(depth):
            features.extend(_convolution(inputs, width, batch_norm=batch_norm))
            inputs = width
        features.append(nn.MaxPool2d(2))
    classifier = wide_classifier(inputs, grid(name, features, size), largest=_LARGEST, classes=classes, dropout=dropout)
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def _convolution(inputs: int, outputs: int, *, batch_norm: bool) -> list[nn.Module]:
    """Return a convolution with its activation; it keeps its bias under batch norm, as the published counts have it."""
    norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
    return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(inplace=True)]
