"""Layers that know their own reverse, to be stacked into an encoder and, read backwards, into its decoder.

In the DeepEx paper every layer has an autoencoder version with a `reverse_forward_execute` (its figure 3). Here a
layer is a plain description: for a given input shape it says its output shape, and builds the module that goes
forwards and, on demand, the module that brings exactly the input shape back. A shape is (channels, height, width) or
(features,), without the batch.

>>> stack = [Convolution(8, kernel=3, stride=2), Pooling(2), Flatten(), Dense(16)]
>>> shapes(stack, (1, 13, 9))
[(1, 13, 9), (8, 6, 4), (8, 3, 2), (48,), (16,)]
>>> stack[0].reverse((1, 13, 9))
ConvTranspose2d(8, 1, kernel_size=(3, 3), stride=(2, 2))
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from deepex.errors import ConfigError
from deepex.nets.geometry import positive

Shape = tuple[int, ...]
Activation = Callable[[], nn.Module]


class Layer(ABC):
    """One layer of a stack. Implementations are frozen, hold no weights, and may be used in several networks.

    `forward` and `reverse` are linear or structural alone. `activation` belongs to the layer's output, so an encoder
    applies it after the layer, and a decoder when it has come back to that output.
    """

    activation: Activation | None = None

    @abstractmethod
    def output(self, shape: Shape) -> Shape:
        """Return the shape that an input of `shape` becomes; ConfigError where the layer cannot take it."""

    @abstractmethod
    def forward(self, shape: Shape) -> nn.Module:
        """Build the module from `shape` to `output(shape)`."""

    @abstractmethod
    def reverse(self, shape: Shape) -> nn.Module:
        """Build a module, with weights of its own, from `output(shape)` back to `shape`."""


@final
@dataclass(frozen=True)
class Convolution(Layer):
    """A square convolution; its reverse is the transposed convolution of the same geometry."""

    out_channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 0
    activation: Activation | None = nn.ReLU

    def __post_init__(self) -> None:
        positive("Convolution", out_channels=self.out_channels, kernel=self.kernel, stride=self.stride)
        if self.padding < 0:
            raise ConfigError(f"Convolution got padding = {self.padding}; it must be at least 0: leave it out for none")

    def output(self, shape: Shape) -> Shape:
        """Return the shape with as many positions as the kernel has on each axis."""
        channels_height_width(self, shape)
        return (self.out_channels, *(_positions(self, shape, self.kernel, self.stride, self.padding)))

    def forward(self, shape: Shape) -> nn.Module:
        """Build the convolution."""
        channels, _, _ = channels_height_width(self, shape)
        return nn.Conv2d(channels, self.out_channels, self.kernel, self.stride, self.padding)

    def reverse(self, shape: Shape) -> nn.Module:
        """Build the transposed convolution, padded on the far side by what the stride did not reach."""
        channels, height, width = channels_height_width(self, shape)
        self.output(shape)
        unreached_height, unreached_width = ((extent + 2 * self.padding - self.kernel) % self.stride for extent in (height, width))
        return nn.ConvTranspose2d(
            self.out_channels,
            channels,
            self.kernel,
            self.stride,
            self.padding,
            output_padding=(unreached_height, unreached_width),
        )


@final
@dataclass(frozen=True)
class Pooling(Layer):
    """Max pooling over kernel×kernel tiles; a rest at the far side is dropped.

    Its reverse repeats each value over its tile (nearest up-sampling). Max un-pooling would need the places of the
    maxima, which an encoder could hand over but a point of latent space, drawn to generate an image, does not have.
    """

    kernel: int = 2

    def __post_init__(self) -> None:
        positive("Pooling", kernel=self.kernel)

    def output(self, shape: Shape) -> Shape:
        """Return the shape with one point per whole tile."""
        channels, _, _ = channels_height_width(self, shape)
        return (channels, *_positions(self, shape, self.kernel, self.kernel, 0))

    def forward(self, shape: Shape) -> nn.Module:
        """Build the pooling."""
        return nn.MaxPool2d(self.kernel)

    def reverse(self, shape: Shape) -> nn.Module:
        """Build the up-sampling to exactly the height and width that were pooled."""
        _, height, width = channels_height_width(self, shape)
        return nn.Upsample(size=(height, width), mode="nearest")


@final
@dataclass(frozen=True)
class Flatten(Layer):
    """Maps to a vector, and back."""

    def output(self, shape: Shape) -> Shape:
        """Return the one extent that holds everything."""
        return (math.prod(shape),)

    def forward(self, shape: Shape) -> nn.Module:
        """Build the flattening."""
        return nn.Flatten()

    def reverse(self, shape: Shape) -> nn.Module:
        """Build the un-flattening."""
        return nn.Unflatten(1, shape)


@final
@dataclass(frozen=True)
class Dense(Layer):
    """A dense layer on a vector; its reverse is a dense layer in the other direction."""

    features: int
    activation: Activation | None = nn.ReLU

    def __post_init__(self) -> None:
        positive("Dense", features=self.features)

    def output(self, shape: Shape) -> Shape:
        """Return the vector's new length."""
        self._length(shape)
        return (self.features,)

    def forward(self, shape: Shape) -> nn.Module:
        """Build the dense layer."""
        return nn.Linear(self._length(shape), self.features)

    def reverse(self, shape: Shape) -> nn.Module:
        """Build the dense layer back."""
        return nn.Linear(self.features, self._length(shape))

    def _length(self, shape: Shape) -> int:
        if len(shape) != 1:
            raise ConfigError(f"{self} got an input of shape {shape}; it takes a vector: put Flatten() before it")
        return shape[0]


def shapes(stack: Sequence[Layer], shape: Shape) -> list[Shape]:
    """Return the shape before the first layer, and after each."""
    if not shape or min(shape) < 1:
        raise ConfigError(f"a stack got inputs of shape {shape}; every extent must be at least 1: check the dataset's images")
    result = [shape]
    for layer in stack:
        result.append(layer.output(result[-1]))
    return result


def channels_height_width(layer: Layer, shape: Shape) -> tuple[int, int, int]:
    """Return the three extents of a map; ConfigError for a vector."""
    if len(shape) != 3:
        raise ConfigError(
            f"{layer} got an input of shape {shape}; it takes (channels, height, width): put it before Flatten() and Dense"
        )
    channels, height, width = shape
    return channels, height, width


def _positions(layer: Layer, shape: Shape, kernel: int, stride: int, padding: int) -> Shape:
    """Count the positions of a window on height and width; ConfigError where there is none."""
    height, width = shape[-2:]
    least = kernel - 2 * padding
    if min(height, width) < least:
        raise ConfigError(
            f"{layer} got a map of {height}×{width}, smaller than its kernel, so nothing would be left; "
            f"it needs at least {least}×{least}: use larger images, fewer strides and poolings, or more padding"
        )
    return tuple((extent + 2 * padding - kernel) // stride + 1 for extent in (height, width))
