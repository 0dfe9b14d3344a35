"""Which of some tensors is written to, in whatever way.

    with Writes({"teacher.weight": teacher.weight}) as writes:
        network(images)
    writes.found                # {"teacher.weight"}

Values would not tell: a mean of two equal networks is what both were.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


class Writes(TorchDispatchMode):
    """Sees every operation on tensors, as autograd does not see one on `weight.data`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.tensors, self.found = tensors, set[str]()
        self._names: dict[int, set[str]] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(_memory(tensor), set()).add(name)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    self.found |= self._names.get(_memory(tensor), set())
        operation: Callable[..., Any] = func
        return operation(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for one in value if isinstance(value, tuple | list) else [value]:
        if isinstance(one, torch.Tensor):
            yield one
