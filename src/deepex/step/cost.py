"""How much memory a step keeps between its forward and its backward pass.

    activation_bytes(network, shape=(3, 224, 224), batch=128)      # 11_000_000_000 for ResNet-50; None if it cannot be told

Two images run forward through the network on the CPU, and what autograd keeps of them is added up. (The meta device would need no
arithmetic, but takes a second or two to load.) It counts float32: with bf16 a step keeps about half.
"""

import warnings
from typing import Final

import torch
from torch import nn

from deepex.arena.network import twin

_IMAGES: Final = 2  # one is too few for batch norm
_THREADS: Final = 4  # several ranks of a node may be here at once


def takes_one(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether one image of `shape` can be a batch: batch norm over a single value per channel cannot be trained."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            twin(network)(torch.zeros(1, *shape))
        except ValueError as error:
            return "more than 1 value per channel" not in str(error)
        except Exception:  # noqa: BLE001 - as below
            return True
    return True


def activation_bytes(network: nn.Module, shape: tuple[int, ...], batch: int) -> int | None:
    """The bytes that autograd keeps of a batch of images of `shape` (channels, height, width), weights not counted.

    The network, on the CPU still, and the random numbers are left as they are. None for a network that fails.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, _THREADS))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again in the first step
            return _saved_bytes(twin(network), torch.zeros(_IMAGES, *shape)) * batch // _IMAGES
    except Exception:  # noqa: BLE001 - it is somebody's network, and its first step will tell what is wrong with it
        return None
    finally:
        torch.set_num_threads(threads)


def forward_flops(network: nn.Module, shape: tuple[int, ...]) -> float:
    """The operations on one image of `shape` in convolutions and products, forward; 0 for a network that fails."""
    from torch.utils.flop_counter import FlopCounterMode  # takes half a second to load

    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with FlopCounterMode(display=False) as counter:
                twin(network)(torch.zeros(_IMAGES, *shape))
        except Exception:  # noqa: BLE001 - as above
            return 0.0
    return float(counter.get_total_flops()) / _IMAGES


def _saved_bytes(network: nn.Module, images: torch.Tensor) -> int:
    weights = {_address(tensor) for tensor in (*network.parameters(), *network.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) not in weights:
            saved[_address(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(images)
    del output
    return sum(storage.nbytes() for storage in saved.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
