"""How much memory a step keeps between its forward and its backward pass, found without running it.

    activation_bytes(network, shape=(3, 224, 224), batch=128)      # 11_000_000_000 for ResNet-50; None if it cannot be told

A copy of the network whose tensors have shapes but no memory (the meta device) runs forward, and what autograd keeps is added up.
It counts float32: with bf16 a step keeps about half.
"""

import copy

import torch
from torch import nn


def activation_bytes(network: nn.Module, shape: tuple[int, ...], batch: int) -> int | None:
    """The bytes that autograd keeps of a batch of images of `shape` (channels, height, width), weights not counted.

    None for a network that cannot run without values, or on no device but its own.
    """
    try:
        twin = _without_memory(network)
        with torch.random.fork_rng(devices=[]):
            return _saved_bytes(twin, torch.empty((batch, *shape), device="meta"))
    except Exception:  # noqa: BLE001 - it is somebody's network, and an estimate is not worth a failed run
        return None


def _without_memory(network: nn.Module) -> nn.Module:
    """A copy on the meta device; nothing is copied but the structure."""
    same: dict[int, object] = {}
    for parameter in network.parameters():
        same[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        same[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(network, same).train()


def _saved_bytes(network: nn.Module, images: torch.Tensor) -> int:
    weights = {_storage(tensor) for tensor in (*network.parameters(), *network.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps the storages alive, so that no number is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in weights:
            saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(images)
    del output
    return sum(storage.nbytes() for storage in saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
