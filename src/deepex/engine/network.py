"""What DeepEx asks of a network before anything is run: of what it is made, and that it can be copied.

check_weights(network)
check_averages(network, replicas=4)
copied = twin(network)
"""

import copy
from itertools import chain

import torch
from torch import nn

from deepex.engine.mode import begin_training
from deepex.errors import ConfigError, told


def check_weights(network: nn.Module) -> None:
    """Raise ConfigError for parameters and buffers that no arena can hold."""
    parameters = dict(network.named_parameters())
    for name, tensor in chain(parameters.items(), network.named_buffers()):
        complaint = _complaint(tensor, trained=name in parameters)
        if complaint is not None:
            raise ConfigError(f"the network's {name!r} {complaint}")
    _check_ties(parameters)
    if not parameters:
        raise ConfigError("the network has no parameters: there is nothing to train; use one with weights, each an nn.Parameter")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"all {len(parameters)} parameters of the network are frozen (requires_grad is false): there is nothing to train; "
            "leave at least its last layer unfrozen"
        )


def check_averages(network: nn.Module, replicas: int) -> None:
    """Raise ConfigError for statistics that are no average over replicas."""
    for name, module in network.named_modules():
        trains = module.training or not network.training
        cumulative = isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None and trains
        if cumulative and module.track_running_stats and replicas > 1:
            raise ConfigError(
                f"batch norm {name!r} has momentum None (a cumulative average), and the {replicas} replicas' counters cannot be "
                "averaged: give it a momentum, for example 0.1, or use one replica"
            )


def twin(network: nn.Module) -> nn.Module:
    """A copy, ready to train, that shares the weights; nobody may update them there."""
    same: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=parameter.requires_grad) for parameter in network.parameters()
    }
    try:
        return begin_training(copy.deepcopy(network, same))
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied, which is needed to try it ({told(error)}); make it of modules, parameters and buffers "
            "alone: for example with torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm"
        ) from error


def _complaint(tensor: torch.Tensor, *, trained: bool) -> str | None:
    """Why a parameter (`trained`) or a buffer cannot be held; None if it can."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet, as it is of a lazy layer: run one batch through the network first, or give the layer its sizes"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}; a network is built on the CPU, and moved from there: leave out `.to(…)` and `.cuda()`"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; weights and buffers must be dense: convert it, for example with to_dense()"
    if tensor.dtype != torch.float32 and (trained or tensor.is_floating_point() or tensor.is_complex()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = "parameters" if trained else "buffers of real and complex numbers"
        return (
            f"is {dtype}; {kind} must be float32: convert the network, for example with network.float(); products in 16 bits are "
            "had with precision=bf16"
        )
    return None


def _check_ties(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse two parameters in one memory: each would get memory of its own, and they would part."""
    found: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = found.setdefault(parameter.data_ptr(), name)
        if other != name and parameter.numel():
            raise ConfigError(
                f"the network's {other!r} and {name!r} are two parameters in the same memory, which training would part: use one "
                "nn.Parameter in both places"
            )
