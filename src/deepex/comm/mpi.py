"""The machine's own MPI through mpi4py, on the tensor's own memory.

    from mpi4py import MPI
    comm = MpiCommunicator(MPI.COMM_WORLD.Split(color))
    comm.sum(tensor)        # MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), …); within one node, see shared.py

MPI starts when the first communicator is built, not on import (Lightning freezes where mpi4py is merely installed: its issue
20049); see library.py. Tensors on an accelerator go by device pointer where the MPI is CUDA-aware, and through one pinned host
buffer, kept for the next time, where it is not.

A communicator for another thread (`for_thread`) posts its collectives and looks after them now and then: MPI has no call that
sleeps, and one that blocks takes the core from the thread that computes. It needs THREAD_MULTIPLE.
"""

import os
from collections.abc import Callable
from time import sleep
from typing import Any, Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator, as_bytes, check_partner, check_parts, check_tensor, scale
from deepex.comm.library import ending, start_mpi
from deepex.comm.shared import NodeMemory
from deepex.errors import CommError
from deepex.machine.mpi import cuda_aware as ask_cuda_aware

_TYPES: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.uint8: "UINT8_T",
}

# Between two looks after a collective that was posted. Short ones end soon; a long one, 100 MB on 2 ranks, needs about ten looks.
_FIRST_PAUSE_SECONDS: Final = 50e-6
_LONGEST_PAUSE_SECONDS: Final = 1e-3


@final
class MpiCommunicator(Communicator):
    """Collectives of an MPI communicator; without an argument, of MPI_COMM_WORLD.

    Works on a duplicate, so that its messages cannot mix with the caller's; `close` frees the duplicate alone.
    `cuda_aware` None asks the library. One that is `posted` never blocks inside MPI, except on device pointers.
    """

    kind = "mpi"

    def __init__(self, comm: Any = None, *, cuda_aware: bool | None = None, posted: bool = False) -> None:
        self._mpi = start_mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self._staging: torch.Tensor | None = None
        self._posted = posted
        self._node = NodeMemory(self)
        if cuda_aware is None and torch.cuda.is_available():
            cuda_aware = ask_cuda_aware(self._mpi.Get_library_version(), os.environ)[0]
        self.cuda_aware = bool(cuda_aware)
        self._locate(self._comm.rank, self._comm.size, "mpi")

    @property
    @override
    def overlaps(self) -> bool:
        return bool(self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE)

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        check_tensor(tensor)
        if not self._node.sum(tensor, weight):
            scale(tensor, weight)
            self._on_memory(tensor, "Allreduce", lambda memory: (self._mpi.IN_PLACE, memory, self._mpi.SUM))

    @override
    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._node.zeros(count, dtype, device)

    @override
    def shares(self, tensor: torch.Tensor) -> bool:
        return self._node.find(tensor) is not None

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._on_memory(tensor, "Bcast", lambda memory: (memory, root))

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = torch.empty((self._comm.size, row.numel()), dtype=row.dtype, device=row.device)
        self._move("Allgather", as_bytes(row.contiguous()), as_bytes(rows), row.nbytes)
        return rows

    @override
    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        check_parts(parts, self._comm.size)
        received = torch.empty_like(parts)
        self._move("Alltoall", as_bytes(parts), as_bytes(received), parts[0].nbytes)
        return received

    @override
    def send(self, tensor: torch.Tensor, to: int) -> None:
        check_tensor(tensor)
        check_partner(self.rank, self.size, to)
        self._on_memory(as_bytes(tensor), "Send", lambda memory: (memory, to), writes=False)

    @override
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        check_tensor(tensor)
        check_partner(self.rank, self.size, source)
        self._on_memory(as_bytes(tensor), "Recv", lambda memory: (memory, source), reads=False)

    @override
    def barrier(self) -> None:
        self._call("Barrier")

    @override
    def split(self, color: int, key: int = 0) -> "MpiCommunicator":
        part = self._comm.Split(color, key)
        try:
            return MpiCommunicator(part, cuda_aware=self.cuda_aware, posted=self._posted)
        finally:
            part.Free()

    @override
    def for_thread(self) -> "MpiCommunicator":
        if not self.overlaps:
            raise CommError(
                f"MPI runs with thread level {self._mpi.Query_thread()}, but a second thread that communicates needs "
                f"THREAD_MULTIPLE ({self._mpi.THREAD_MULTIPLE}): initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE), "
                "on every rank, before the first communicator is built"
            )
        return MpiCommunicator(self._comm, cuda_aware=self.cuda_aware, posted=True)

    @override
    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    @override
    def close(self) -> None:
        self._staging = None
        self._node.release()
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def _call(self, name: str, *arguments: Any, on_device: bool = False) -> None:
        """Run the call `name` of mpi4py. Posted ones of Open MPI may crash on device pointers (its issue 9845)."""
        if not self._posted or on_device:
            getattr(self._comm, name)(*arguments)
            return
        request, pause = _while_mpi_runs(self._mpi, getattr(self._comm, f"I{name.lower()}"), *arguments), _FIRST_PAUSE_SECONDS
        while not _while_mpi_runs(self._mpi, request.Test):
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _on_memory(
        self,
        tensor: torch.Tensor,
        name: str,
        arguments: Callable[[list[Any]], tuple[Any, ...]],
        *,
        reads: bool = True,
        writes: bool = True,
    ) -> None:
        """Run a call of MPI in place on the tensor's memory. MPI knows no streams: what computes the tensor must have finished.

        What only `reads` or only `writes` the tensor is staged one way.
        """
        check_tensor(tensor)
        if tensor.device.type == "cpu":
            self._call(name, *arguments(self._memory(tensor)))
            return
        stream = torch.cuda.current_stream(tensor.device)
        if self.cuda_aware:
            stream.synchronize()
            self._call(name, *arguments(self._memory(tensor)), on_device=True)
            return
        staging = self._staged(tensor.nbytes).view(tensor.dtype)
        if reads:
            staging.copy_(tensor.view(-1), non_blocking=True)
        stream.synchronize()
        self._call(name, *arguments(self._memory(staging)))
        if writes:
            tensor.view(-1).copy_(staging, non_blocking=True)

    def _move(self, name: str, sent: torch.Tensor, received: torch.Tensor, count: int) -> None:
        """Run a collective that moves bytes: from `sent` to `received`, `count` from each rank."""
        if sent.device.type == "cpu":
            self._call(name, self._memory(sent, count), self._memory(received, count))
            return
        stream = torch.cuda.current_stream(sent.device)
        if self.cuda_aware:
            stream.synchronize()  # also for `received`, whose memory may have had another use
            self._call(name, self._memory(sent, count), self._memory(received, count), on_device=True)
            return
        staging = self._staged(sent.nbytes + received.nbytes)
        outgoing, incoming = staging[: sent.nbytes], staging[sent.nbytes :]
        outgoing.copy_(sent.view(-1), non_blocking=True)
        stream.synchronize()
        self._call(name, self._memory(outgoing, count), self._memory(incoming, count))
        received.view(-1).copy_(incoming, non_blocking=True)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._staging[:nbytes]

    def _memory(self, tensor: torch.Tensor, count: int | None = None) -> list[Any]:
        """What mpi4py calls a buffer: address, count and type. Nothing is copied, on whichever device the address lies."""
        name = _TYPES.get(tensor.dtype)
        if name is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
            raise CommError(f"MPI cannot sum {tensor.dtype}; it knows {known}: convert the tensor first")
        nbytes = tensor.numel() * tensor.element_size()
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), nbytes)
        return [memory, tensor.numel() if count is None else count, getattr(self._mpi, name)]


def _while_mpi_runs(mpi: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call MPI from another thread, which the end of the program may overtake: MPI ends a process that calls it after its end."""
    with ending:
        if mpi.Is_finalized():
            raise CommError("MPI has ended before a collective of another thread: wait for all of them first")
        return call(*arguments)
