"""Networks by name, for images of any number of channels and any size that the network admits.

>>> from deepex.nets import build, networks
>>> net = build("lenet", channels=1, size=(120, 85), classes=27)
>>> networks()[:3]
['alexnet', 'caffenet', 'convnet']

A network returns logits; `cvae` returns (logits, mean, log_variance). `deepex.nets.initialise` draws its weights anew,
`deepex.nets.autoencoder` makes a variational autoencoder from any stack of layers.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import nn

from deepex.errors import ConfigError, UnknownName
from deepex.nets import alexnet, convnet, cvae, googlenet, lenet, resnet, vgg

__all__ = ["build", "networks"]

_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet.alexnet,
    "caffenet": alexnet.caffenet,
    "convnet": convnet.convnet,
    "convnet-full": convnet.convnet_full,
    "cvae": cvae.cvae,
    "googlenet": googlenet.googlenet,
    "lenet": lenet.lenet,
    "lenet-caffe": lenet.lenet_caffe,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
    "resnet101": resnet.resnet101,
    "resnet152": resnet.resnet152,
    "vgg11": vgg.vgg11,
    "vgg13": vgg.vgg13,
    "vgg16": vgg.vgg16,
    "vgg19": vgg.vgg19,
}


def networks() -> list[str]:
    """Return the names that `build` knows."""
    return list(_NETWORKS)


def build(name: str, /, *, channels: int, size: tuple[int, int], classes: int, **options: Any) -> nn.Module:
    """Return the named network for images of `channels` and `size` (height, width), with the options that it has.

    It raises UnknownName for the name, and ConfigError for an option, for its type, and for a size below the
    network's minimum.
    """
    if name not in _NETWORKS:
        raise UnknownName("network", name, _NETWORKS)
    network = _NETWORKS[name]
    _check_options(name, signature(network).parameters, options)
    return network(channels=channels, size=size, classes=classes, **options)


def _check_options(name: str, parameters: Any, options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that the network does not have, or a value of another type than the default."""
    known = {key: parameter.default for key, parameter in parameters.items() if parameter.default is not Parameter.empty}
    for option, value in options.items():
        if option not in known:
            has = ", ".join(f"{key} ({default})" for key, default in known.items())
            raise ConfigError(f"{name} has no option {option!r}; its options and their defaults are: {has or 'none'}")
        wanted = type(known[option])
        # A bool is an int to Python, but `latent = true` is a mistake; a whole number is a fine float.
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"{name} got {option} = {value!r}; it must be of type {wanted.__name__}, like {known[option]!r}")
