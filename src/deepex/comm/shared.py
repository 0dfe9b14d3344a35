"""Memory that the ranks of one node share, so that they sum it where it lies.

    memory = NodeMemory(comm)
    arena = memory.zeros(count, torch.float32, device)       # collective; memory of the process's own where it cannot be shared
    memory.sum(arena[100:200], weight=0.25)                  # False: it does not lie here

Each rank makes a block and maps those of the others. In a sum each rank takes an equal part of the range: it adds up that part of
all blocks, in the order of the ranks, and writes the result into each. So a rank reads the range once and writes it once, the
weighting costs nothing extra, and the bits are the same everywhere; a weighted sum of 102 MB on 2 ranks takes 0.55 of the time of
a bare MPI_Allreduce that weights nothing (benchmarks/one_sync.py).

A block is an anonymous file in memory (memfd): it has no name that a killed job could leave behind, and is not bounded by the size
of /dev/shm. Its pages are claimed when it is made, so that a lack of memory is an error then, not a bus error later.
"""

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any, Final, final

import torch

from deepex.comm.base import Communicator, own_zeros, scale
from deepex.errors import CommError

_HEADER_BYTES: Final = 4096  # a page: token, weight, offset and size, from each rank to the others
_TOKEN_BYTES: Final = 16
_PART_BYTES: Final = 256  # parts begin on multiples of this: no two ranks write to one cache line
_CHUNK_BYTES: Final = 512 << 10  # of each block at a time, so that they meet in the cache


@final
class NodeMemory:
    """What a communicator's ranks share: until it closes, or until other memory is asked for and nobody uses this any more."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._shared: list[SharedBlocks] = []

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make zeroed memory: shared on the host if all ranks are on one node and the system lets them. Collective."""
        self._shared = [blocks for blocks in self._shared if blocks.used]
        if device.type == "cpu" and self._comm.size > 1 and self._comm.place.num_nodes == 1:
            blocks = share_memory(self._comm, count * dtype.itemsize)
            if blocks is not None:
                self._shared.append(blocks)
                return blocks.own(dtype)
        return own_zeros(count, dtype, device)

    def find(self, tensor: torch.Tensor) -> "SharedBlocks | None":
        """The blocks in which a tensor lies."""
        return next((blocks for blocks in self._shared if blocks.holds(tensor)), None)

    def sum(self, tensor: torch.Tensor, weight: float) -> bool:
        """Sum a tensor over the ranks if it lies here; else leave it."""
        blocks = self.find(tensor)
        if blocks is not None:
            blocks.sum(tensor, weight)
        return blocks is not None

    def release(self) -> None:
        """Forget the others' blocks. A tensor in this rank's own stays valid."""
        self._shared = []


@final
class SharedBlocks:
    """One block per rank, mapped by every rank; `comm` has these ranks, in this order."""

    def __init__(self, comm: Communicator, maps: list[mmap.mmap]) -> None:
        self._comm = comm
        self._own = maps[comm.rank]
        self._user: weakref.ref[torch.UntypedStorage] | None = None
        self._headers = [torch.frombuffer(m, dtype=torch.float64, offset=_TOKEN_BYTES, count=3) for m in maps]
        self._blocks = [torch.frombuffer(m, dtype=torch.uint8, offset=_HEADER_BYTES) for m in maps]

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's block, which is `used` as long as this tensor or a view of it is there."""
        own = torch.frombuffer(self._own, dtype=dtype, offset=_HEADER_BYTES)
        self._user = weakref.ref(own.untyped_storage())
        return own

    @property
    def used(self) -> bool:
        """Whether somebody still has what `own` gave."""
        return self._user is not None and self._user() is not None

    def of(self, rank: int) -> torch.Tensor:
        """The block of any rank, as bytes."""
        return self._blocks[rank]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this rank's block."""
        return tensor.untyped_storage().data_ptr() == self._blocks[self._comm.rank].untyped_storage().data_ptr()

    def sum(self, tensor: torch.Tensor, weight: float) -> None:
        """Replace the tensor, on every rank, by the sum over all ranks of `weight` · tensor."""
        own = self._comm.rank
        start = tensor.data_ptr() - self._blocks[own].data_ptr()
        self._headers[own].copy_(torch.tensor([weight, start, tensor.nbytes], dtype=torch.float64))
        self._comm.barrier()
        weights, starts, sizes = zip(*(header.tolist() for header in self._headers), strict=True)
        if len(set(starts)) > 1 or len(set(sizes)) > 1:
            raise CommError(f"the ranks sum different parts of their memory: at {starts}, {sizes} bytes")
        part = -(-tensor.nbytes // (self._comm.size * _PART_BYTES)) * _PART_BYTES
        begin, end = start + min(own * part, tensor.nbytes), start + min((own + 1) * part, tensor.nbytes)
        chunk = _CHUNK_BYTES * torch.get_num_threads()
        for low in range(begin, end, chunk):
            high = min(low + chunk, end)
            _sum_into_all([block[low:high].view(tensor.dtype) for block in self._blocks], weights)
        self._comm.barrier()


def _sum_into_all(pieces: list[torch.Tensor], weights: tuple[float, ...]) -> None:
    total, *others = pieces
    scale(total, weights[0])
    for piece, weight in zip(others, weights[1:], strict=True):
        if weight:
            total.add_(piece, alpha=1 if weight == 1 else weight)
    for piece in others:
        piece.copy_(total)


def share_memory(comm: Communicator, nbytes: int) -> SharedBlocks | None:
    """Make zeroed blocks of `nbytes`, or give None on every rank if some rank cannot. Collective over the ranks of one node."""
    token = os.urandom(_TOKEN_BYTES)
    file = _make_file(token, _HEADER_BYTES + nbytes)
    try:
        offers = comm.gather(None if file is None else [os.getpid(), file, token.hex()])
        maps = None if None in offers else _map_all(offers, _HEADER_BYTES + nbytes)
        complete = all(comm.gather(maps is not None))
    finally:
        if file is not None:
            os.close(file)
    return SharedBlocks(comm, maps) if complete and maps is not None else None


def _make_file(token: bytes, nbytes: int) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        file = os.memfd_create("deepex")
        try:
            os.posix_fallocate(file, 0, nbytes)
            os.pwrite(file, token, 0)
        except OSError:
            os.close(file)
            raise
        return file
    return None


def _map_all(offers: list[Any], nbytes: int) -> list[mmap.mmap] | None:
    """Map every rank's file. The token tells whether it is really that: ranks in other containers have other process numbers."""
    maps = []
    with suppress(OSError, ValueError):
        for process, number, token in offers:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                maps.append(mmap.mmap(file, nbytes))
            finally:
                os.close(file)
            if maps[-1][:_TOKEN_BYTES] != bytes.fromhex(token):
                return None
        return maps
    return None
