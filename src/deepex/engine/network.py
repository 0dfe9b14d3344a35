"""What DeepEx asks of a network before anything is run: of what it is made, and that it can be copied.

check_weights(network)
check_averages(network, replicas=4)
copied = twin(network)
held = Held(copied)         # its parameters, as they are now
held.check()                # what it has done to them meanwhile
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
    """A copy, ready to train. It shares nothing: a network may change its weights itself, as it does to normalise them."""
    try:
        return begin_training(copy.deepcopy(network))
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied, which is needed to try it ({told(error)}); make it of modules, parameters and buffers "
            "alone: for example with torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm"
        ) from error


def beside_tensors(network: nn.Module) -> list[str]:
    """The modules that keep something beside parameters and buffers, which no checkpoint has."""
    usual = nn.Module.get_extra_state
    return [name or type(part).__name__ for name, part in network.named_modules() if type(part).get_extra_state is not usual]


class Held:
    """Where the parameters of a network are, so that one that it takes elsewhere is noticed: nobody else would train that one."""

    def __init__(self, network: nn.Module) -> None:
        self._found = [
            (owner._parameters, name, f"{path}.{name}".lstrip("."), parameter, parameter.data_ptr(), parameter.requires_grad)
            for path, owner in network.named_modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]

    def check(self) -> None:
        """Raise ConfigError if one is not where it was, or is frozen and was not, or the other way round."""
        for holder, name, path, parameter, address, trained in self._found:
            if holder.get(name) is not parameter or parameter.data_ptr() != address:
                raise ConfigError(
                    f"the network puts another tensor in the place of its parameter {path!r} while it runs, and only the one that "
                    "it began with is trained and kept: change that, with torch.no_grad() and copy_(), or make it a buffer"
                )
            if parameter.requires_grad != trained:
                raise ConfigError(
                    f"the network changes requires_grad of its parameter {path!r} while it runs, but what is trained is settled "
                    "before: set it when the network is made"
                )


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
