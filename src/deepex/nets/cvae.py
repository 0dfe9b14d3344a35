"""The DeepEx paper's convolutional variational autoencoder for contact matrices of folding proteins.

>>> import torch
>>> with torch.device("meta"):
...     net = cvae(channels=1, size=(28, 28), classes=1)
>>> sum(parameter.numel() for parameter in net.parameters())
26384647
"""

from torch import nn

from deepex.nets.autoencoder import autoencoder
from deepex.nets.geometry import Size, check, positive
from deepex.nets.stack import Convolution, Dense, Flatten


def cvae(
    *,
    channels: int,
    size: Size,
    classes: int,  # noqa: ARG001 - every network takes it; this one has no classes
    filters: int = 128,
    features: int = 128,
    latent: int = 3,
) -> nn.Module:
    """Return three 3×3 convolutions, a dense layer, the latent variables, and the mirrored decoder.

    It has 26,384,647 parameters at 1×28×28. The paper's dense layer of 100352×128 weights, 100352 = 128·28·28, tells
    that all convolutions keep height and width; its 26 million weights and biases tell that the decoder has its own.
    The network returns (logits, mean, log_variance).
    """
    check("cvae", channels=channels, size=size)
    positive("cvae", filters=filters, features=features, latent=latent)
    convolution = Convolution(filters, kernel=3, padding=1)
    return autoencoder([convolution, convolution, convolution, Flatten(), Dense(features)], (channels, *size), latent)
