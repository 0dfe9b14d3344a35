"""Which layers train: those that are in training mode when the network is handed over.

    begin_training(network)
    with evaluating(network):
        …                           # every layer evaluates
    …                               # each layer is in its own mode again

A layer that its owner put into `eval()` stays there: a batch norm whose statistics are frozen, say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def begin_training(network: AnyModule) -> AnyModule:
    """Make the network train, and return it.

    Layers of a network in training mode keep their own modes. A network that is in evaluation mode as a whole trains as a whole:
    libraries give pretrained ones so.
    """
    asleep = [module for module in network.modules() if not module.training] if network.training else []
    network.train()  # always: one that overrides it keeps some layers from training so
    for module in asleep:
        module.training = False
    return network


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put every layer into evaluation mode, and afterwards back into its own."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        network.train(modes[0][1])  # a layer may do more than to note its mode
        for module, training in modes:
            module.training = training
