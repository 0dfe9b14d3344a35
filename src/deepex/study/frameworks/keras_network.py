"""Plain layers (layers.py) as a functional model of Keras, with their weights.

model = make_keras(layers, (28, 28, 1))
model(images, training=True)
"""

from typing import Any

import numpy as np

from deepex.study.frameworks.layers import Convolution, Dense, Flatten, Layer, MaxPool, Mean, Norm, Relu, Shortcut, walk

_ORDER = {
    "kernel": ("kernel", "bias"),
    "scale": ("scale", "bias", "mean", "var"),
}  # in which a layer of Keras lists its weights


def make_keras(layers: tuple[Layer, ...], shape: tuple[int, ...]) -> Any:
    """The model for images of `shape` (height, width, channels)."""
    import keras

    inputs = keras.Input(shape)
    model = keras.Model(inputs, _apply(layers, inputs, keras))
    for layer in walk(layers):
        values = {**layer.parameters, **layer.statistics}
        if values:
            names = _ORDER["scale" if "scale" in values else "kernel"]
            model.get_layer(layer.name).set_weights([values[name] for name in names if name in values])
    return model


def _apply(layers: tuple[Layer, ...], x: Any, keras: Any) -> Any:
    for layer in layers:
        x = _layer(layer, x, keras)
    return x


def _layer(layer: Layer, x: Any, keras: Any) -> Any:  # noqa: PLR0911 - a case for each kind
    kinds, name = keras.layers, layer.name
    bias = "bias" in layer.parameters
    match layer:
        case Convolution():
            kernel = layer.parameters["kernel"].shape
            x = _pad(x, layer.sides, 0.0, keras) if not _is_same(layer) else x
            padding = "same" if _is_same(layer) else "valid"
            return kinds.Conv2D(kernel[-1], kernel[:2], strides=layer.stride, padding=padding, use_bias=bias, name=name)(x)
        case Norm():
            return kinds.BatchNormalization(momentum=layer.momentum, epsilon=layer.epsilon, name=name)(x)
        case Dense():
            return kinds.Dense(layer.parameters["kernel"].shape[1], use_bias=bias, name=name)(x)
        case Relu():
            return kinds.ReLU(name=name)(x)
        case MaxPool():
            return kinds.MaxPooling2D(layer.window, layer.stride, name=name)(_pad(x, layer.sides, -np.inf, keras))
        case Mean():
            return kinds.GlobalAveragePooling2D(name=name)(x)
        case Flatten():
            return kinds.Flatten(name=name)(x)
        case Shortcut():
            joined = kinds.Add(name=name)([_apply(layer.main, x, keras), _apply(layer.projection, x, keras)])
            return kinds.ReLU(name=f"{name}_relu")(joined)
    raise AssertionError(layer)


def _is_same(layer: Convolution) -> bool:
    """Whether Keras's own padding is the layer's: with a stride it would be uneven."""
    kernel = layer.parameters["kernel"].shape
    return layer.stride == (1, 1) and layer.sides == tuple(((size - 1) // 2, size // 2) for size in kernel[:2])


def _pad(x: Any, sides: Any, value: float, keras: Any) -> Any:
    """Surround feature maps with `value`."""
    if not any(any(side) for side in sides):
        return x
    if value == 0.0:
        return keras.layers.ZeroPadding2D(sides)(x)
    return keras.ops.pad(x, ((0, 0), *sides, (0, 0)), constant_values=value)
