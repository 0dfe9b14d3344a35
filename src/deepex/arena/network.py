"""What DeepEx asks of a network before anything is run: of what it is made, and that it can be copied.

check_weights(network)
check_averages(network, replicas=4)
copied = twin(network)
"""

import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from deepex.arena.mode import begin_training
from deepex.errors import ConfigError, told


def check_weights(network: nn.Module) -> None:
    """Raise ConfigError for parameters and buffers that no arena can hold."""
    parameters = dict(network.named_parameters())
    for name, tensor in chain(parameters.items(), network.named_buffers()):
        complaint = _complaint(tensor, trained=name in parameters)
        if complaint is not None:
            raise ConfigError(f"the network's {name!r} {complaint}")
    _check_memory(network)
    if not any(parameter.numel() for parameter in parameters.values()):
        raise ConfigError("the network has no parameters: there is nothing to train; use one with weights, each an nn.Parameter")
    if not any(parameter.requires_grad and parameter.numel() for parameter in parameters.values()):
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


def twin(network: nn.Module, *, channels_last: bool = False) -> nn.Module:
    """A copy, ready to train. It shares nothing: a network may change its weights itself, as it does to normalise them."""
    try:
        copied = begin_training(copy.deepcopy(network, _copied_scripts(network) | _copied_results(network)))
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied, which is needed to try it ({told(error)}); make it of modules, parameters and buffers "
            "alone"
        ) from error
    if channels_last:
        for parameter in copied.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return copied


@contextmanager
def unchanged(network: nn.Module) -> Iterator[None]:
    """Put back the values of a network of which copies are tried: a function that it keeps may name it, and is not copied."""
    tensors = [*network.parameters(), *network.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            if not torch.equal(tensor, value):
                tensor.data.copy_(value)


def standing_still(network: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of real numbers that training should not change: frozen weights, and buffers of layers in evaluation mode."""
    frozen = {name: parameter for name, parameter in network.named_parameters() if not parameter.requires_grad}
    moving = moving_buffers(network)
    return frozen | {
        name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point() and id(buffer) not in moving
    }


def moving_buffers(module: nn.Module) -> set[int]:
    """The buffers that training may change: not those of layers that are in evaluation mode while the others train.

    A mean of equal numbers may differ from them in the last bit, so what stands still is not averaged.
    """
    training = [part for part in module.modules() if part.training or not module.training]
    return {id(buffer) for part in training for buffer in part.buffers(recurse=False)}


def _copied_scripts(network: nn.Module) -> dict[int, nn.Module]:
    """Copies of what TorchScript has compiled, by identity: one that deepcopy makes computes with the weights of its original."""
    scripts = [module for module in network.modules() if isinstance(module, torch.jit.ScriptModule)]
    inner = {part for script in scripts for part in script.modules() if part is not script}
    copied: dict[int, nn.Module] = {}
    for script in scripts:
        if script not in inner:
            file = io.BytesIO()
            torch.jit.save(script, file)
            file.seek(0)
            copied[id(script)] = torch.jit.load(file)
    return copied


def _copied_results(network: nn.Module) -> dict[int, torch.Tensor]:
    """Copies of what modules keep of what they computed, by identity, as pruned layers do: deepcopy refuses such tensors."""
    kept = [one for module in network.modules() for value in vars(module).values() for one in listed(value)]
    return {id(one): one.detach().clone() for one in kept if isinstance(one, torch.Tensor) and one.grad_fn is not None}


def beside_tensors(network: nn.Module) -> list[str]:
    """The modules that keep something beside parameters and buffers, which no checkpoint has."""
    usual = nn.Module.get_extra_state
    return [name or type(part).__name__ for name, part in network.named_modules() if type(part).get_extra_state is not usual]


def kept_with_history(network: nn.Module) -> list[str]:
    """The tensors that modules keep, as attributes or as buffers, with the way in which they were computed."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in network.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in listed(value))
    ]


def listed(value: object) -> Iterable[object]:
    """A value, or those that it holds."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple | list) else [value]


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
        if tensor.is_complex():
            return f"is {dtype}; {kind} must be float32: keep it as torch.view_as_real(…), and take view_as_complex() in forward"
        return (
            f"is {dtype}; {kind} must be float32: convert the network, for example with network.float(); products in 16 bits are "
            "had with precision=bf16"
        )
    return None


def _check_memory(network: nn.Module) -> None:
    """Refuse parameters that share memory: each element would get memory of its own, and they would part."""
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        if _overlaps_itself(parameter):
            raise ConfigError(
                f"the network's {name!r} has elements that share memory, as expand() makes them: give each its own with clone()"
            )
    for (one, other), _ in in_one_memory(network):
        if {one, other} <= parameters.keys():
            raise ConfigError(
                f"the network's {one!r} and {other!r} are two parameters in the same memory, which training would part: use one "
                "nn.Parameter in both places"
            )
        if {one, other} & parameters.keys():
            name, buffer = (one, other) if one in parameters else (other, one)
            raise ConfigError(
                f"the network's buffer {buffer!r} is in the memory of its parameter {name!r}, which training would part: use the "
                "parameter in both places, or give the buffer its own with clone()"
            )


def aliases(network: nn.Module) -> list[tuple[str, str, str]]:
    """The attributes in the memory of a parameter or a buffer: the path of the module, the attribute, and whose memory it is."""
    held = {tensor.untyped_storage().data_ptr(): name for name, tensor in _named_tensors(network) if tensor.numel()}
    known = {id(tensor) for _, tensor in _named_tensors(network)}
    return [
        (path, key, held[one.untyped_storage().data_ptr()])
        for path, module in network.named_modules()
        for key, value in vars(module).items()
        for one in listed(value)
        if isinstance(one, torch.Tensor) and id(one) not in known and one.layout is torch.strided
        if one.numel() and one.untyped_storage().data_ptr() in held
    ]


def _named_tensors(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(network.named_parameters(), network.named_buffers())


def in_one_memory(network: nn.Module) -> Iterator[tuple[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]]:
    """The pairs of different parameters and buffers of which some elements are the same."""
    storages: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in _named_tensors(network):
        if tensor.numel():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((*_range(tensor), name, tensor))
    for found in storages.values():
        found.sort(key=lambda one: one[0])
        for index, (_, ends, name, tensor) in enumerate(found):
            for begins, _, other, its in found[index + 1 :]:
                if begins >= ends:
                    break
                if _overlap(tensor, its):
                    yield (name, other), (tensor, its)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage, whose ranges overlap, have an element in common; of different kinds: in any case."""
    if one.itemsize != other.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(torch.isin(_offsets(one), _offsets(other)).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from which and up to which it has elements."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Where in its storage each element is."""
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    return offsets


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    beyond = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1):
        if stride < beyond:
            return True
        beyond += (size - 1) * stride
    return False
