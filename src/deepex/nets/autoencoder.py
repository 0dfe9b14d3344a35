"""A variational autoencoder (Kingma and Welling 2013) from any stack of reversible layers.

>>> import torch
>>> from deepex.nets.stack import Convolution, Dense, Flatten, Pooling
>>> stack = [Convolution(8, stride=2), Pooling(2), Flatten(), Dense(16)]
>>> net = autoencoder(stack, shape=(1, 13, 9), latent=3)
>>> logits, mean, log_variance = net(torch.rand(4, 1, 13, 9))
>>> logits.shape, mean.shape
(torch.Size([4, 1, 13, 9]), torch.Size([4, 3]))
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from deepex.nets.geometry import positive
from deepex.nets.stack import Flatten, Layer, Shape, shapes


@final
class VariationalAutoencoder(nn.Module):
    """Encoder, latent variables and decoder.

    `forward` returns (logits, mean, log_variance). The logits have the input's shape; the sigmoid belongs to the
    loss. In training the latent variables are drawn around the mean by the reparametrisation trick; in evaluation
    they are the mean.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, features: int, latent: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.mean = nn.Linear(features, latent)
        self.log_variance = nn.Linear(features, latent)
        self.decoder = decoder

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction's logits and the two parameters of the latent distribution."""
        mean, log_variance = self.encode(x)
        return self.decode(self._sample(mean, log_variance)), mean, log_variance

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of the latent variables of each input."""
        features = self.encoder(x)
        return self.mean(features), self.log_variance(features)

    def decode(self, z: Tensor) -> Tensor:
        """Return the logits of the inputs that the latent points stand for."""
        logits: Tensor = self.decoder(z)
        return logits

    def _sample(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """Draw in training; return the mean in evaluation."""
        if not self.training:
            return mean
        return mean + torch.exp(log_variance / 2) * torch.randn_like(mean)


def autoencoder(stack: Sequence[Layer], shape: Shape, latent: int) -> VariationalAutoencoder:
    """Return the autoencoder whose encoder is `stack` and whose decoder is its mirror image with weights of its own.

    A stack that ends in maps is flattened. The decoder's output has exactly `shape`. Its last layer has no activation.
    """
    positive("autoencoder", latent=latent)
    along = shapes(stack, shape)
    if len(along[-1]) != 1:
        return autoencoder([*stack, Flatten()], shape, latent)
    (features,) = along[-1]
    encoder, decoder = nn.Sequential(), nn.Sequential(nn.Linear(latent, features))
    for layer, before in zip(stack, along, strict=False):
        encoder.append(layer.forward(before))
        encoder.extend(_activations(layer))
    for layer, before in zip(reversed(stack), reversed(along[:-1]), strict=True):
        # The activation of a layer's output stands in the decoder where that output has come back.
        decoder.extend(_activations(layer))
        decoder.append(layer.reverse(before))
    return VariationalAutoencoder(encoder, decoder, features=features, latent=latent)


def _activations(layer: Layer) -> list[nn.Module]:
    """Return the layer's activation, or nothing."""
    return [] if layer.activation is None else [layer.activation()]
