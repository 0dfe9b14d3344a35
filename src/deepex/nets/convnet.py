"""The two Cifar-10 networks that Caffe ships, called ConvNet in the Stampede2 study.

>>> net = convnet(channels=3, size=(32, 32), classes=10)
>>> sum(parameter.numel() for parameter in net.parameters())
145578
"""

from collections import OrderedDict

from torch import nn

from deepex.nets.geometry import Size, check, grid
from deepex.nets.response import LocalResponse


def convnet(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return Caffe's `cifar10_quick`: 145,578 parameters at 3×32×32 and 10 classes.

    As published, the first pooling stands before its ReLU, and no activation stands between the two dense layers.
    """
    check("convnet", channels=channels, size=size, classes=classes)
    features = nn.Sequential(
        *(_convolution(channels, 32), _maximum(), nn.ReLU(inplace=True)),
        *(_convolution(32, 32), nn.ReLU(inplace=True), _average()),
        *(_convolution(32, 64), nn.ReLU(inplace=True), _average()),
    )
    height, width = grid("convnet", features, size)
    classifier = nn.Sequential(nn.Linear(64 * height * width, 64), nn.Linear(64, classes))
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))


def convnet_full(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return Caffe's `cifar10_full`, which normalises: 89,578 parameters at 3×32×32 and 10 classes."""
    check("convnet-full", channels=channels, size=size, classes=classes)
    features = nn.Sequential(
        *(_convolution(channels, 32), _maximum(), nn.ReLU(inplace=True), _response()),
        *(_convolution(32, 32), nn.ReLU(inplace=True), _average(), _response()),
        *(_convolution(32, 64), nn.ReLU(inplace=True), _average()),
    )
    height, width = grid("convnet-full", features, size)
    classifier = nn.Linear(64 * height * width, classes)
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))


def _convolution(inputs: int, outputs: int) -> nn.Module:
    """Return a 5×5 convolution that keeps height and width."""
    return nn.Conv2d(inputs, outputs, 5, padding=2)


def _maximum() -> nn.Module:
    """Return a 3×3 max pooling that halves, rounding up as Caffe does: 32 becomes 16, not 15."""
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def _average() -> nn.Module:
    """Return a 3×3 average pooling that halves, rounding up as Caffe does."""
    return nn.AvgPool2d(3, 2, ceil_mode=True)


def _response() -> nn.Module:
    """Return the normalisation of `cifar10_full`, over 3×3 points of one channel."""
    return LocalResponse(3, alpha=5e-5, region="within")
