"""The machine's own MPI through mpi4py, on the tensor's own memory.

    from mpi4py import MPI
    comm = MpiCommunicator(MPI.COMM_WORLD.Split(color))
    comm.sum(tensor)        # MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), …); within one node, see shared.py

MPI starts when the first communicator is built, not on import (Lightning freezes where mpi4py is merely installed: its issue
20049), with the thread level that is asked for. Tensors on an accelerator go by device pointer where the MPI is CUDA-aware, and
through one pinned host buffer, kept for the next time, where it is not.
"""

import atexit
import os
from typing import Any, Final, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator, check_tensor, scale
from deepex.comm.shared import NodeMemory
from deepex.errors import CommError
from deepex.machine.mpi import cuda_aware as ask_cuda_aware
from deepex.machine.mpi import identify

_TYPES: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.uint8: "UINT8_T",
}

# Within a node, below THREAD_MULTIPLE, MPICH 5 sums through a path that takes 76 ms for 102 MB on 2 ranks; its general one 50 ms.
_MPICH_ALLREDUCE: Final = ("MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM", "mpir")


def start_mpi(thread_level: str = "FUNNELED") -> Any:
    """Import mpi4py and initialise MPI if nobody has; return `mpi4py.MPI`."""
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(
            f"no MPI library could be loaded: {error}; install one with `pip install mpich`, "
            "or name the site's own in the variable MPI4PY_LIBMPI"
        ) from error
    wanted = getattr(MPI, f"THREAD_{thread_level}")
    if not MPI.Is_initialized():
        if identify(MPI.Get_library_version())[0] == "MPICH":
            os.environ.setdefault(*_MPICH_ALLREDUCE)
        MPI.Init_thread(wanted)
        atexit.register(_finalize, MPI)
    if MPI.Query_thread() < wanted:
        raise CommError(
            f"MPI runs with thread level {MPI.Query_thread()}, but {thread_level} ({wanted}) is needed: initialise it with "
            f"MPI.Init_thread(MPI.THREAD_{thread_level}) before the first communicator is built"
        )
    return MPI


@final
class MpiCommunicator(Communicator):
    """Collectives of an MPI communicator; without an argument, of MPI_COMM_WORLD.

    Works on a duplicate, so that its messages cannot mix with the caller's; `close` frees the duplicate alone.
    `cuda_aware` None asks the library.
    """

    kind = "mpi"

    def __init__(self, comm: Any = None, *, thread_level: str = "FUNNELED", cuda_aware: bool | None = None) -> None:
        self._mpi = start_mpi(thread_level)
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self._staging: torch.Tensor | None = None
        self._node = NodeMemory(self)
        if cuda_aware is None and torch.cuda.is_available():
            cuda_aware = ask_cuda_aware(self._mpi.Get_library_version(), os.environ)[0]
        self.cuda_aware = bool(cuda_aware)
        self._locate(self._comm.rank, self._comm.size, "mpi")

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        check_tensor(tensor)
        if not self._node.sum(tensor, weight):
            scale(tensor, weight)
            self._on_memory(tensor, lambda memory: self._comm.Allreduce(self._mpi.IN_PLACE, memory, self._mpi.SUM))

    @override
    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._node.zeros(count, dtype, device)

    @override
    def shares(self, tensor: torch.Tensor) -> bool:
        return self._node.find(tensor) is not None

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._on_memory(tensor, lambda memory: self._comm.Bcast(memory, root))

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        row = row.contiguous()
        rows = torch.empty((self._comm.size, row.numel()), dtype=row.dtype)
        self._comm.Allgather(self._memory(row), self._memory(rows, row.numel()))
        return rows

    @override
    def barrier(self) -> None:
        self._comm.Barrier()

    @override
    def split(self, color: int, key: int = 0) -> "MpiCommunicator":
        part = self._comm.Split(color, key)
        try:
            return MpiCommunicator(part, cuda_aware=self.cuda_aware)
        finally:
            part.Free()

    @override
    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    @override
    def close(self) -> None:
        self._staging = None
        self._node.release()
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def _on_memory(self, tensor: torch.Tensor, call: Any) -> None:
        """Run `call` on the tensor's memory. MPI knows no streams: what computes the tensor must have finished."""
        check_tensor(tensor)
        if tensor.device.type == "cpu":
            call(self._memory(tensor))
            return
        stream = torch.cuda.current_stream(tensor.device)
        if self.cuda_aware:
            stream.synchronize()
            call(self._memory(tensor))
            return
        staging = self._staged(tensor)
        staging.copy_(tensor.view(-1), non_blocking=True)
        stream.synchronize()
        call(self._memory(staging))
        tensor.view(-1).copy_(staging, non_blocking=True)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._staging[:nbytes].view(tensor.dtype)

    def _memory(self, tensor: torch.Tensor, count: int | None = None) -> list[Any]:
        """What mpi4py calls a buffer: address, count and type. Nothing is copied, on whichever device the address lies."""
        name = _TYPES.get(tensor.dtype)
        if name is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
            raise CommError(f"MPI cannot sum {tensor.dtype}; it knows {known}: convert the tensor first")
        nbytes = tensor.numel() * tensor.element_size()
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), nbytes)
        return [memory, tensor.numel() if count is None else count, getattr(self._mpi, name)]


def _finalize(mpi: Any) -> None:
    if not mpi.Is_finalized():
        mpi.Finalize()
