"""AlexNet (Krizhevsky 2012) and CaffeNet, Caffe's variant that pools before it normalises.

>>> import torch
>>> with torch.device("meta"):
...     net = alexnet(channels=3, size=(227, 227), classes=1000)
>>> sum(parameter.numel() for parameter in net.parameters())
60965224
"""

from collections import OrderedDict

from torch import nn

from deepex.nets.classifier import wide_classifier
from deepex.nets.geometry import Size, check, grid, probability
from deepex.nets.response import LocalResponse

_LARGEST = 6  # the published feature map is 6×6


def alexnet(*, channels: int, size: Size, classes: int, dropout: float = 0.5) -> nn.Module:
    """Return Krizhevsky's network in one column, with his groups and normalisation.

    It has 60,965,224 parameters at 3 channels and 1,000 classes. The first convolution pads by 2, which gives his 6×6
    map from 224×224 as well as from Caffe's 227×227.
    """
    # The paper has n = 5, k = 2, α = 1e-4 on the sum: five times that on the mean.
    first = [_response(k=2.0, alpha=5e-4), _halving()]
    second = [_response(k=2.0, alpha=5e-4), _halving()]
    return _network("alexnet", first, second, channels=channels, size=size, classes=classes, dropout=dropout)


def caffenet(*, channels: int, size: Size, classes: int, dropout: float = 0.5) -> nn.Module:
    """Return `bvlc_reference_caffenet`: AlexNet with pooling before normalisation; 60,965,224 parameters as well."""
    first = [_halving(), _response(k=1.0, alpha=1e-4)]
    second = [_halving(), _response(k=1.0, alpha=1e-4)]
    return _network("caffenet", first, second, channels=channels, size=size, classes=classes, dropout=dropout)


def _network(
    name: str,
    first: list[nn.Module],
    second: list[nn.Module],
    *,
    channels: int,
    size: Size,
    classes: int,
    dropout: float,
) -> nn.Module:
    """Return five convolutions and three dense layers, with what follows the first two convolutions as given."""
    check(name, channels=channels, size=size, classes=classes)
    probability(name, dropout=dropout)
    features = nn.Sequential(
        *(nn.Conv2d(channels, 96, 11, stride=4, padding=2), nn.ReLU(inplace=True), *first),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(inplace=True), *second),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        _halving(),
    )
    classifier = wide_classifier(256, grid(name, features, size), largest=_LARGEST, classes=classes, dropout=dropout)
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def _response(*, k: float, alpha: float) -> nn.Module:
    """Return the normalisation over five channels."""
    return LocalResponse(5, alpha=alpha, k=k)


def _halving() -> nn.Module:
    """Return the overlapping 3×3 max pooling with stride 2."""
    return nn.MaxPool2d(3, 2)
