"""A network's forward pass as a graph of its modules (torch.fx), with as many of them open as can be."""

from typing import Any

from torch import fx, nn


def trace(network: nn.Module) -> fx.Graph | None:
    """The graph; modules whose code cannot be traced, or that have hooks or change themselves, stay closed.

    None if the network itself must stay closed. It is left as it was.
    """
    closed: set[nn.Module] = set()
    graph = None
    for module in reversed(list(network.modules())):  # children come after their parents
        tracer = _Tracer(closed)
        if module is network or not tracer.is_leaf_module(module, ""):
            before = _snapshot(module)
            try:
                graph = tracer.trace(module)
            except Exception:  # noqa: BLE001 - it is somebody's code, and closed it works as it is
                closed.add(module)
            if _restore(before):  # it keeps something from call to call, which a graph would not
                closed.add(module)
    return None if network in closed or has_hooks(network) else graph


def _snapshot(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the modules within hold: each table of theirs, and a copy of it."""
    tables = [table for m in module.modules() for table in (m.__dict__, m._buffers, m._parameters)]
    return [(table, dict(table)) for table in tables]


def _restore(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Put back what has changed; whether anything had."""
    changed = False
    for table, copy in before:
        if table.keys() != copy.keys() or any(table[key] is not value for key, value in copy.items()):
            table.clear()
            table.update(copy)
            changed = True
    return changed


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to the module's calls."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def calls(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    """Whether a node calls one of these functions or methods."""
    return node.op in ("call_function", "call_method") and node.target in functions


class _Tracer(fx.Tracer):
    """Leaves closed what torch.nn has, and what is in `closed`."""

    def __init__(self, closed: set[nn.Module]) -> None:
        super().__init__()
        self._closed = closed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = getattr(m, "is_local_response", False)  # there is a kernel for the whole of it
        return known or m in self._closed or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)
