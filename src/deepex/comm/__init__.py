"""Ranks that talk: one small abstract Communicator, four implementations, a wrapper with hooks, rank discovery, local launch.

Names are resolved on use: finding one's place and launching ranks need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepex.comm.background import Background
    from deepex.comm.base import Communicator
    from deepex.comm.place import Place, find_place
    from deepex.comm.selection import CommChoice, as_communicator, choose, connect
    from deepex.comm.wrapped import Call, WrappedCommunicator

__all__ = [
    "Background",
    "Call",
    "CommChoice",
    "Communicator",
    "Place",
    "WrappedCommunicator",
    "as_communicator",
    "choose",
    "connect",
    "find_place",
]

_HOMES = {
    "Background": "background",
    "Call": "wrapped",
    "Communicator": "base",
    "Place": "place",
    "WrappedCommunicator": "wrapped",
    "find_place": "place",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"deepex.comm.{_HOMES.get(name, 'selection')}"), name)
    raise AttributeError(f"module 'deepex.comm' has no attribute {name!r}; it has {', '.join(__all__)}")
