"""Plain layers (layers.py) as a network of Flax.

network, variables = make_flax(layers)
logits, changed = network.apply(variables, images, True, None, mutable=["batch_stats"])
"""

from functools import partial
from typing import Any

from deepex.study.frameworks.layers import Convolution, Dense, Flatten, Layer, MaxPool, Mean, Norm, Relu, Shortcut, walk


def make_flax(layers: tuple[Layer, ...]) -> tuple[Any, dict[str, Any]]:
    """The network, called with images (n, height, width, channels), whether to train and perhaps a mask; and its variables."""
    from flax import linen

    class Network(linen.Module):  # type: ignore[misc] # untyped
        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, images: Any, train: bool, mask: Any = None) -> Any:
            return _apply(layers, images, partial(_norm, linen, train=train, mask=mask), linen)

    variables: dict[str, Any] = {"params": {}, "batch_stats": {}}
    for layer in walk(layers):
        if layer.parameters:
            variables["params"][layer.name] = dict(layer.parameters)
        if layer.statistics:
            variables["batch_stats"][layer.name] = dict(layer.statistics)
    return Network(), {collection: found for collection, found in variables.items() if found}


def _norm(linen: Any, layer: Norm, x: Any, *, train: bool, mask: Any) -> Any:
    norm = linen.BatchNorm(use_running_average=not train, momentum=layer.momentum, epsilon=layer.epsilon, name=layer.name)
    return norm(x, mask=mask)


def _apply(layers: tuple[Layer, ...], x: Any, norm: Any, linen: Any) -> Any:
    for layer in layers:
        x = _layer(layer, x, norm, linen)
    return x


def _layer(layer: Layer, x: Any, norm: Any, linen: Any) -> Any:  # noqa: PLR0911 - a case for each kind
    import jax

    match layer:
        case Convolution():
            kernel = layer.parameters["kernel"]
            bias = "bias" in layer.parameters
            convolution = linen.Conv(
                kernel.shape[-1], kernel.shape[:2], strides=layer.stride, padding=layer.sides, use_bias=bias, name=layer.name
            )
            return convolution(x)
        case Norm():
            return norm(layer, x)
        case Dense():
            dense = linen.Dense(layer.parameters["kernel"].shape[1], use_bias="bias" in layer.parameters, name=layer.name)
            return dense(x)
        case Relu():
            return jax.nn.relu(x)
        case MaxPool():
            return linen.max_pool(x, layer.window, strides=layer.stride, padding=layer.sides)
        case Mean():
            return x.mean((1, 2))
        case Flatten():
            return x.reshape(len(x), -1)
        case Shortcut():
            return jax.nn.relu(_apply(layer.main, x, norm, linen) + _apply(layer.projection, x, norm, linen))
    raise AssertionError(layer)
