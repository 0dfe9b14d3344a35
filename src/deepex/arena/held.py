"""What a network does to its own tensors while it runs.

held = Held(network)        # its parameters and buffers, as they are now
held.check()                # what it has done to them meanwhile
"""

import torch
from torch import nn

from deepex.arena.network import in_one_memory
from deepex.errors import ConfigError


class Held:
    """What a network is made of, so that what it changes of that is noticed: nobody else would train it, or keep it.

    A buffer that is not persistent is a cache: it may come, go, and change its shape.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._parameters = {
            name: (parameter, parameter.data_ptr(), parameter.requires_grad)
            for name, parameter in network.named_parameters(remove_duplicate=False)
        }
        self._buffers = {name: (buffer, *_kind(buffer)) for name, buffer in network.named_buffers(remove_duplicate=False)}
        self._kept = _persistent_buffers(network)
        self._shared = [(names, [one.clone() for one in pair]) for names, pair in in_one_memory(network)]

    def check(self) -> None:
        """Raise ConfigError if the network is not made of what it was."""
        parameters = dict(self._network.named_parameters(remove_duplicate=False))
        for name, (parameter, address, trained) in self._parameters.items():
            if parameters.get(name) is not parameter or parameter.data_ptr() != address:
                raise ConfigError(
                    f"the network puts another tensor in the place of its parameter {name!r} while it runs, and only the one that "
                    "it began with is trained and kept: change that, with torch.no_grad() and copy_(), or make it a buffer"
                )
            if parameter.requires_grad != trained:
                raise ConfigError(
                    f"the network changes requires_grad of its parameter {name!r} while it runs, but what is trained is settled "
                    "before: set it when the network is made"
                )
        self._refuse_new("parameter", parameters.keys() - self._parameters.keys())
        self._check_buffers()

    def _check_buffers(self) -> None:
        buffers, kept = dict(self._network.named_buffers(remove_duplicate=False)), _persistent_buffers(self._network)
        self._refuse_new("buffer", kept - self._kept)
        for name, (buffer, dtype, shape) in self._buffers.items():
            found = buffers.get(name)
            cache = name not in self._kept and found is not buffer  # what is resized would reach into its neighbours
            there = found is not None and (tuple(found.shape) == shape or cache) and found.dtype == dtype
            if not there and (found is not None or name in self._kept):
                now = "nothing" if found is None else "one of {} {}".format(*_described(*_kind(found)))
                raise ConfigError(
                    f"the network puts {now} in the place of its buffer {name!r} of {' '.join(_described(dtype, shape))} while "
                    "it runs, and only such a one is kept: run a batch through the network before you return it, or make it an "
                    "attribute"
                )
        for (one, other), before in self._shared:
            if not all(torch.equal(buffers[name], value) for name, value in zip((one, other), before, strict=True)):
                raise ConfigError(
                    f"the network's buffers {one!r} and {other!r} are in the same memory, and it changes them: training would part "
                    "them; register one of them, and make the other of it in forward"
                )

    def _refuse_new(self, what: str, names: set[str]) -> None:
        if names:
            raise ConfigError(
                f"the network makes its {what} {min(names)!r} while it runs, and only what it began with is trained and kept: make "
                "it in __init__, or run a batch through the network before you return it"
            )


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, str]:
    return str(dtype).removeprefix("torch."), str(shape)


def _persistent_buffers(network: nn.Module) -> set[str]:
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in network.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }
