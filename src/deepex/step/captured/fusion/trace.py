"""A network's forward pass as a graph of its modules (torch.fx), with as many of them open as can be.

A trace runs the code of a module once, with stand-ins for tensors, and keeps what was done to these. All else that the code does
would be done once and never again: change a buffer, draw a number, count its calls, switch gradients or autocast off for a while.
A module that does such a thing stays closed, and is left as it was.
"""

import operator
import random
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

IN_PLACE: Final = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def trace(network: nn.Module) -> fx.Graph | None:
    """The graph; modules whose code cannot be traced, or that have hooks, stay closed. None if that is the network itself."""
    closed: set[nn.Module] = set()
    graph = None
    for module in reversed(list(network.modules())):  # children come after their parents
        tracer = _Tracer(closed)
        if module is network or not tracer.is_leaf_module(module, ""):
            before = [(held, dict(held)) for one in module.modules() for held in (vars(one), one._buffers)]
            drawn = host_random()
            try:
                with _NoArithmetic():  # type: ignore[no-untyped-call] # torch has no annotations for it
                    graph = tracer.trace(module)
            except Exception:  # noqa: BLE001 - it is somebody's code, and closed it works as it is
                closed.add(module)
            if _restored(before) or host_random() != drawn:
                closed.add(module)
    return None if network in closed or has_hooks(network) else graph


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to the module's calls, or to the gradients of its parameters."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    listened = any(parameter._backward_hooks for parameter in module.parameters(recurse=False))
    return listened or any(getattr(module, name) for name in hooks)


def calls(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    """Whether a node calls one of these functions or methods."""
    return node.op in ("call_function", "call_method") and node.target in functions


def host_random() -> tuple[Any, ...]:
    """The states of the host's generators of random numbers: another one if somebody has drawn."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - it is the one that somebody's code may use
    return random.getstate(), bytes(numpy[1]), *numpy[2:], bytes(torch.default_generator.get_state().numpy())


def _restored(before: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Give modules the attributes and buffers back that they had; whether there was anything to do."""
    changed = False
    for held, values in before:
        if held.keys() != values.keys() or any(held[name] is not value for name, value in values.items()):
            held.clear()
            held.update(values)
            changed = True
    return changed


def _modes() -> tuple[Any, ...]:
    kinds = ("cuda", "cpu")
    return torch.is_grad_enabled(), *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


class _NoArithmetic(TorchDispatchMode):
    """Refuses to compute with real tensors: the trace would keep the result, not how it came about."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} works on tensors that are none of the trace's")


def _operator(function: Any) -> Any:
    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


class _Proxy(fx.Proxy):
    """A stand-in that keeps `x += y` as what it is: torch.fx would make it `x = x + y`, and forget who else has x."""

    __iadd__, __isub__, __imul__, __itruediv__ = map(_operator, IN_PLACE)


class _Tracer(fx.Tracer):
    """Leaves closed what torch.nn has, and what is in `closed`."""

    proxy_buffer_attributes = True  # what is done to a buffer belongs to the graph

    def __init__(self, closed: set[nn.Module]) -> None:
        super().__init__()
        self._closed, self._modes = closed, _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = getattr(m, "is_local_response", False)  # there is a kernel for the whole of it
        return known or m in self._closed or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A stand-in for what a node gives."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, unless it would compute in another mode than here (`with torch.no_grad():`), which the graph cannot tell."""
        if _modes() != self._modes:
            raise RuntimeError("gradients or autocast are switched within the module")
        return super().create_node(*args, **kwargs)
