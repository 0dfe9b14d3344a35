"""GoogLeNet (Szegedy 2014, "Going deeper with convolutions"), without its auxiliary classifiers.

>>> net = googlenet(channels=3, size=(224, 224), classes=1000)
>>> sum(parameter.numel() for parameter in net.parameters())
6998552
"""

from collections import OrderedDict
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from deepex.nets.geometry import Size, check, grid, probability
from deepex.nets.response import LocalResponse


class _Widths(NamedTuple):
    """Channels of an inception block, in the order of the paper's table 1."""

    one: int
    three_reduced: int
    three: int
    five_reduced: int
    five: int
    pooled: int


_STAGES = (
    (_Widths(64, 96, 128, 16, 32, 32), _Widths(128, 128, 192, 32, 96, 64)),
    (
        _Widths(192, 96, 208, 16, 48, 64),
        _Widths(160, 112, 224, 24, 64, 64),
        _Widths(128, 128, 256, 24, 64, 64),
        _Widths(112, 144, 288, 32, 64, 64),
        _Widths(256, 160, 320, 32, 128, 128),
    ),
    (_Widths(256, 160, 320, 32, 128, 128), _Widths(384, 192, 384, 48, 128, 128)),
)


@final
class Inception(nn.Module):
    """1×1, 3×3 and 5×5 convolutions and a pooling side by side, their channels joined; height and width stay."""

    def __init__(self, inputs: int, widths: _Widths) -> None:
        super().__init__()
        self.outputs = widths.one + widths.three + widths.five + widths.pooled
        self.one = nn.Sequential(*_convolution(inputs, widths.one, 1))
        self.three = nn.Sequential(
            *_convolution(inputs, widths.three_reduced, 1), *_convolution(widths.three_reduced, widths.three, 3)
        )
        self.five = nn.Sequential(*_convolution(inputs, widths.five_reduced, 1), *_convolution(widths.five_reduced, widths.five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *_convolution(inputs, widths.pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the four branches joined along the channels."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def googlenet(*, channels: int, size: Size, classes: int, dropout: float = 0.4) -> nn.Module:
    """Return the network of the paper: 6,998,552 parameters at 3 channels and 1,000 classes.

    It has the paper's 5×5 branches, biases and local response normalisation, not the 3×3 branches and batch norm of
    later ports; its poolings round up, as in Caffe. The auxiliary classifiers, which only help training from the weak
    initialisations of the time, are left out, so that every network returns one tensor of logits.
    """
    check("googlenet", channels=channels, size=size, classes=classes)
    probability("googlenet", dropout=dropout)
    features = nn.Sequential(
        *(*_convolution(channels, 64, 7, stride=2), _halving(), LocalResponse(5, alpha=1e-4)),
        *(*_convolution(64, 64, 1), *_convolution(64, 192, 3), LocalResponse(5, alpha=1e-4)),
    )
    inputs = 192
    for stage in _STAGES:
        features.append(_halving())
        for widths in stage:
            block = Inception(inputs, widths)
            features.append(block)
            inputs = block.outputs
    grid("googlenet", features, size)
    classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, classes))
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> list[nn.Module]:
    """Return a convolution padded so that stride 1 keeps height and width, and its activation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2), nn.ReLU(inplace=True)]


def _halving() -> nn.Module:
    """Return the overlapping 3×3 max pooling with stride 2, rounding up."""
    return nn.MaxPool2d(3, 2, ceil_mode=True)
