"""Random first weights, by name and from a generator of one's own.

>>> import torch
>>> net = initialise(torch.nn.Linear(8, 4), "xavier", torch.Generator().manual_seed(7))
>>> bool(net.bias.abs().sum() == 0)
True

Norm layers keep the weight 1 and the bias 0 that they are built with.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from deepex.errors import ConfigError, UnknownName

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _Spread(NamedTuple):
    """A distribution around zero: `normal` with a deviation, or `uniform` with a bound; biases too, or zeros."""

    kind: str
    scale: float
    biases: bool = False


def _pytorch(layer: nn.Module) -> _Spread:
    """U(±1/√n) for weights and biases, n as PyTorch counts it: the size of one slice along the weight's first axis."""
    return _Spread("uniform", 1 / math.sqrt(cast("Tensor", layer.weight)[0].numel()), biases=True)


def _xavier(layer: nn.Module) -> _Spread:
    """U(±√(6/(inputs + outputs))): Glorot and Bengio 2010."""
    return _Spread("uniform", math.sqrt(6 / sum(_fans(layer))))


def _he(layer: nn.Module) -> _Spread:
    """N(0, 2/inputs): He 2015, forward variant."""
    return _Spread("normal", math.sqrt(2 / _fans(layer)[0]))


# Rules that look at the layer, and rules with a fixed scale that the caller may replace.
_FITTED: dict[str, Callable[[nn.Module], _Spread]] = {"default": _pytorch, "xavier": _xavier, "he": _he}
_SCALED = {"gaussian": _Spread("normal", 0.01), "uniform": _Spread("uniform", 0.05)}


def initialisers() -> list[str]:
    """Return the names that `initialise` knows."""
    return sorted([*_FITTED, *_SCALED])


def initialise(module: AnyModule, how: str, generator: torch.Generator | None = None, *, scale: float | None = None) -> AnyModule:
    """Draw the weights of all convolutions and dense layers of `module` anew, in place, and return it.

    `how` is `default` (He's for a ResNet, else PyTorch's own, which draws biases too), `gaussian` (standard deviation
    `scale`, 0.01 unless told), `uniform` (±`scale`, 0.05), `xavier` or `he`. All but PyTorch's own set biases to
    zero. Numbers are drawn in single precision on the generator's device and then copied, so that a generator on the
    host gives the same weights to a module on any device and in any memory format.
    """
    if how not in initialisers():
        raise UnknownName("initialiser", how, initialisers())
    if scale is not None and (how not in _SCALED or not scale > 0):
        raise ConfigError(
            f"initialiser {how!r} got scale = {scale}; a scale is a positive number, for {' or '.join(_SCALED)} only: leave it out"
        )
    if how == "default":
        how = getattr(module, "initialiser", how)
    for layer in module.modules():
        if isinstance(layer, _WEIGHTED):
            spread = _FITTED[how](layer) if how in _FITTED else _SCALED[how]
            _draw_layer(layer, spread if scale is None else spread._replace(scale=scale), generator)
    return module


@torch.no_grad()
def _draw_layer(layer: nn.Module, spread: _Spread, generator: torch.Generator | None) -> None:
    """Draw a layer's weight, and its bias where the rule says so."""
    _draw(cast("Tensor", layer.weight), spread, generator)
    bias = cast("Tensor | None", layer.bias)
    if bias is None:
        return
    if spread.biases:
        _draw(bias, spread, generator)
    else:
        bias.zero_()


def _draw(target: Tensor, spread: _Spread, generator: torch.Generator | None) -> None:
    """Fill `target` in the order of its indices, whatever its strides."""
    device = target.device if generator is None else generator.device
    values = torch.empty(target.shape, device=device, dtype=torch.float32)
    if spread.kind == "normal":
        values.normal_(0, spread.scale, generator=generator)
    else:
        values.uniform_(-spread.scale, spread.scale, generator=generator)
    target.copy_(values)


def _fans(layer: nn.Module) -> tuple[int, int]:
    """Count the weights into one output and out of one input; transposed convolutions store the axes the other way."""
    weight = cast("Tensor", layer.weight)
    groups = cast("int", getattr(layer, "groups", 1))
    points = math.prod(weight.shape[2:])
    if isinstance(layer, _TRANSPOSED):
        return weight.shape[0] // groups * points, weight.shape[1] * points
    return weight.shape[1] * points, weight.shape[0] // groups * points
