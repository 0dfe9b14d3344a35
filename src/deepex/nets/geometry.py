"""What sizes a network admits, derived from its layers.

The height and width after a chain of convolutions and poolings follow from the layers themselves, so the smallest
image that a network takes is found by asking the layers, not kept in a table that could disagree with them.

>>> from torch import nn
>>> features = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2))
>>> grid("lenet", features, (28, 28))
(5, 5)
>>> minimum(features)
(12, 12)
"""

from collections.abc import Iterator
from itertools import count
from typing import cast

from torch import nn

from deepex.errors import ConfigError

Size = tuple[int, int]

_WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


def check(network: str, *, channels: int, size: Size, classes: int = 1) -> None:
    """Raise ConfigError unless the input has a channel, two positive extents, and there is a class to tell."""
    positive(network, channels=channels, classes=classes)
    if len(size) != 2 or any(extent < 1 for extent in size):
        raise ConfigError(
            f"{network} got images of size {tuple(size)}; a size is (height, width), each at least 1: check the dataset's images"
        )


def positive(network: str, **values: int) -> None:
    """Raise ConfigError for the first of the named values that is not at least 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{network} got {name} = {value}; it must be at least 1: set {name} to a positive whole number")


def probability(network: str, **values: float) -> None:
    """Raise ConfigError for the first of the named values that lies outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{network} got {name} = {value}; it is a share, so set it to at least 0 and less than 1")


def grid(network: str, features: nn.Module, size: Size) -> Size:
    """Return the height and width that `features` makes of images of `size`; ConfigError where nothing is left."""
    height, width = (_after(features, axis, extent) for axis, extent in enumerate(size))
    if min(height, width) < 1:
        least_height, least_width = minimum(features)
        raise ConfigError(
            f"{network} got images of {size[0]}×{size[1]} (height×width) and needs at least "
            f"{least_height}×{least_width}: "
            "resize the images, or choose lenet or, for any size, resnet18"
        )
    return height, width


def minimum(features: nn.Module) -> Size:
    """Return the smallest height and width of which `features` leaves at least one point."""
    height, width = (next(extent for extent in count(1) if _after(features, axis, extent) >= 1) for axis in (0, 1))
    return height, width


def _after(features: nn.Module, axis: int, extent: int) -> int:
    """Follow one extent through the layers; 0 as soon as a window does not fit."""
    for window in _windows(features):
        extent = _slide(window, axis, extent)
        if extent < 1:
            return 0
    return extent


def _windows(features: nn.Module) -> Iterator[nn.Module]:
    """Yield the convolutions and poolings of nested sequences in order; any other module keeps height and width."""
    if isinstance(features, _WINDOWS):
        yield features
    elif isinstance(features, nn.Sequential):
        for module in features:
            yield from _windows(module)


def _slide(window: nn.Module, axis: int, extent: int) -> int:
    """Count the positions of a window along one axis, by the rule of PyTorch (and, with `ceil_mode`, of Caffe)."""
    kernel, stride, padding = (_along(getattr(window, name), axis) for name in ("kernel_size", "stride", "padding"))
    room = extent + 2 * padding - kernel
    if not getattr(window, "ceil_mode", False):
        return room // stride + 1
    positions = -(-room // stride) + 1
    # A last window that would start in the padding on the far side is dropped.
    return positions - 1 if (positions - 1) * stride >= extent + padding else positions


def _along(value: object, axis: int) -> int:
    """Take one axis of a setting that PyTorch keeps as a number or as a pair."""
    return cast("int", value[axis] if isinstance(value, tuple) else value)
