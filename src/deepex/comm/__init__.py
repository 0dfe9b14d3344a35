"""Ranks that talk: one small abstract Communicator, four implementations, rank discovery, local launch."""

from deepex.comm.base import Communicator
from deepex.comm.choose import Choice, as_communicator, choose, connect
from deepex.comm.place import Place, find_place

__all__ = ["Choice", "Communicator", "Place", "as_communicator", "choose", "connect", "find_place"]
