"""From a name in the configuration to an initialised network: one of `deepex.nets`, or the user's own.

    build_network(config, manifest)         # config.net = "resnet50" or "package.module:function"

A user's function is called with those of `channels`, `size`, `classes` that it takes, and with `net_options`.
"""

import inspect
from typing import Any

import torch
from torch import nn

from deepex import nets
from deepex.arena.network import check_weights
from deepex.data.manifest import Manifest
from deepex.errors import ConfigError, UserError, told
from deepex.nets.initialise import initialise
from deepex.recipes.factory import find_factory
from deepex.training.config import RunConfig


def build_network(config: RunConfig, manifest: Manifest) -> nn.Module:
    """Build the network for the samples of a dataset; its initial weights follow from the seed alone."""
    channels, height, width = manifest.shape
    size = config.augment.size(height, width)
    shape: dict[str, Any] = {"channels": channels, "size": size, "classes": max(len(manifest.classes), 1)}
    if clash := sorted(shape.keys() & config.net_options.keys()):
        raise ConfigError(
            f"net_options has {clash[0]!r}, but channels, size and classes are those of the dataset, and are given to net "
            f"{config.net!r}: leave it out, or give your function's parameter another name"
        )
    before = torch.random.get_rng_state()
    torch.manual_seed(config.seed)
    try:
        own = ":" in config.net
        network = _build_own(config, shape) if own else nets.build(config.net, **shape, **config.net_options)
        check_weights(network)
        if config.init != "default":
            initialise(network, config.init)
    finally:
        torch.random.set_rng_state(before)
    return network


def _build_own(config: RunConfig, shape: dict[str, Any]) -> nn.Module:
    function = find_factory(config.net)
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in shape.items() if takes_any or name in parameters}
    try:
        network = function(**given, **config.net_options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever it is, it is somebody's code
        raise ConfigError(
            f"net {config.net!r} called with {given | config.net_options} raised {told(error)}; mend it there"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"net {config.net!r} returned {type(network).__name__}; it must return a torch.nn.Module")
    return network
