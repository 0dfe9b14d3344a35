"""One rank: every collective is already done.

>>> SoloCommunicator().gather("me")
['me']
"""

import os
import socket
from typing import final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator, as_bytes, check_partner, check_parts, check_tensor, scale
from deepex.comm.place import Place


@final
class SoloCommunicator(Communicator):
    """A job of one process. Starts no MPI."""

    kind = "solo"

    def __init__(self) -> None:
        self.place = Place(host=socket.gethostname())

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        check_tensor(tensor)
        scale(tensor, weight)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_tensor(tensor)

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return as_bytes(row.contiguous())[None].clone().view(row.dtype)  # torch cannot copy all types, but their bytes

    @override
    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        check_parts(parts, 1)
        return as_bytes(parts).clone().view(parts.dtype)

    @override
    def send(self, tensor: torch.Tensor, to: int) -> None:
        check_partner(0, 1, to)

    @override
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        check_partner(0, 1, source)

    @override
    def barrier(self) -> None:
        return

    @override
    def split(self, color: int, key: int = 0) -> "SoloCommunicator":
        return SoloCommunicator()

    @override
    def for_thread(self) -> "SoloCommunicator":
        return SoloCommunicator()

    @override
    def abort(self, code: int) -> None:
        os._exit(code)

    @override
    def close(self) -> None:
        return
