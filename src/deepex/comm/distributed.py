"""gloo and NCCL, through torch.distributed.

    comm = DistributedCommunicator("gloo")                       # under torchrun
    comm = DistributedCommunicator("nccl", bootstrap=mpi_comm)   # under mpiexec or srun: MPI tells everyone where rank 0 is
    comm = DistributedCommunicator("nccl", bootstrap=gloo_comm)  # on the same ranks

NCCL moves device tensors only, so the `nccl` kind carries gloo for the small host tensors (`gather`).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final
from uuid import uuid4

import torch
import torch.distributed as dist
from typing_extensions import override

from deepex.comm.base import Communicator, as_bytes, check_partner, check_parts, check_tensor, scale
from deepex.comm.place import find_place
from deepex.comm.shared import NodeMemory
from deepex.errors import CommError

_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
_TIMEOUT = timedelta(minutes=30)


@final
class DistributedCommunicator(Communicator):
    """A torch.distributed process group; `bootstrap` is a communicator that already runs and finds rank 0 for the others.

    A default group that the caller made is used as it is and left open by `close`.
    """

    def __init__(self, kind: str, *, bootstrap: Communicator | None = None, group: Any = None) -> None:
        self.kind = kind
        self._bootstrap, self._node = bootstrap, NodeMemory(self)
        self._owns_world = group is None and not dist.is_initialized()
        if self._owns_world:
            _start(kind, bootstrap)
        self._carrier: DistributedCommunicator | None = None  # what this one was built on, and closes with it
        if isinstance(bootstrap, DistributedCommunicator) and group is None:
            self._carrier, group = bootstrap, dist.new_group(backend=_BACKENDS[kind], timeout=_TIMEOUT)
        self._group = group if group is not None else dist.group.WORLD
        self._ranks = dist.get_process_group_ranks(self._group)
        self._locate(dist.get_rank(self._group), dist.get_world_size(self._group), "torch.distributed")

    @override
    def _sums_on(self) -> torch.device:
        return torch.device("cuda" if self.kind == "nccl" else "cpu")

    @property
    @override
    def overlaps(self) -> bool:
        return self.kind == "gloo"  # NCCL on several GPUs is untested

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        check_tensor(tensor)
        if not self._node.sum(tensor, weight):
            scale(tensor, weight)
            dist.all_reduce(tensor, group=self._group)

    @override
    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._node.zeros(count, dtype, device)

    @override
    def shares(self, tensor: torch.Tensor) -> bool:
        return self._node.find(tensor) is not None

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_tensor(tensor)
        dist.broadcast(tensor, self._ranks[root], group=self._group)

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = torch.empty((self.size, row.numel()), dtype=row.dtype, device=row.device)
        dist.all_gather(list(as_bytes(rows).unbind()), as_bytes(row.contiguous()), group=self._group)
        return rows

    @override
    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        check_parts(parts, self.size)
        received = torch.empty_like(parts)
        dist.all_to_all_single(as_bytes(received), as_bytes(parts), group=self._group)
        return received

    @override
    def send(self, tensor: torch.Tensor, to: int) -> None:
        check_tensor(tensor)
        check_partner(self.rank, self.size, to)
        dist.send(as_bytes(tensor), self._ranks[to], group=self._group)

    @override
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        check_tensor(tensor)
        check_partner(self.rank, self.size, source)
        dist.recv(as_bytes(tensor), self._ranks[source], group=self._group)

    @override
    def barrier(self) -> None:
        self.sum(torch.zeros(1))  # a host tensor, so that `nccl` needs no device for it

    @override
    def split(self, color: int, key: int = 0) -> "DistributedCommunicator":
        rows = self.gather([color, key, uuid4().hex])
        members = sorted((r for r in range(self.size) if rows[r][0] == color), key=lambda r: (rows[r][1], r))
        ranks = [self._ranks[r] for r in members]
        if ranks != sorted(ranks):
            raise CommError("torch.distributed orders a group by rank: split with key=0, or use the mpi communicator")
        with _group_name(rows[members[0]][2]):
            group = dist.new_group(ranks, backend=_BACKENDS[self.kind], use_local_synchronization=True, timeout=_TIMEOUT)
        return DistributedCommunicator(self.kind, bootstrap=self._bootstrap, group=group)

    @override
    def for_thread(self) -> "DistributedCommunicator":
        # NCCL connects at the first collective, through a store that serves one call of a process at a time. In the thread that
        # could wait for a rank which itself waits for this one's main thread; here the sums that are checked connect all ranks.
        return self.split(0)

    @override
    def abort(self, code: int) -> None:
        if self._bootstrap is not None:
            self._bootstrap.abort(code)
        os._exit(code)  # torchrun ends the other ranks; gloo's see the connection close

    @override
    def close(self) -> None:
        self._node.release()
        if self._owns_world:
            dist.destroy_process_group()
        elif self._group is not dist.group.WORLD:
            dist.destroy_process_group(self._group)
        # The last reference: gloo joins its threads here. One that lets go of its last tensor only after Python has begun to
        # end would abort a run that is done (terminate called without an active exception).
        self._group = None
        if self._carrier is not None:
            self._carrier.close()


@contextmanager
def _group_name(name: str) -> Iterator[None]:
    """Let torch call the next group `name`, on which its ranks have agreed.

    Its own name for a group that only its members make is of their numbers and of how many groups this process has. So one that is
    made after another was closed finds that one's addresses in the store, and ranks with different numbers of groups never meet.
    """
    original = dist.distributed_c10d._process_group_name
    setattr(dist.distributed_c10d, "_process_group_name", lambda *_, **__: name)  # noqa: B010 - mypy knows it as a function
    try:
        yield
    finally:
        setattr(dist.distributed_c10d, "_process_group_name", original)  # noqa: B010 - as above


def _tcp_store(host: str, port: int, size: int, **options: Any) -> Any:
    return getattr(dist, "TCPStore")(host, port, size, **options)  # noqa: B009 - torch documents it but does not export it to mypy


def _start(kind: str, bootstrap: Communicator | None) -> None:
    backend = _BACKENDS[kind]
    if bootstrap is None:
        place = find_place(os.environ)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise CommError(
                f"{kind} does not know where rank 0 is: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
                "set both to the host and a free port of rank 0, or start with torchrun, or with mpiexec or srun where an MPI is "
                "installed"
            )
        dist.init_process_group(backend, rank=place.rank, world_size=place.size, timeout=_TIMEOUT)
        return
    rank, size = bootstrap.rank, bootstrap.size
    store = _tcp_store("localhost", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    one_node = bootstrap.place.num_nodes == 1
    host = "localhost" if one_node else socket.getfqdn()
    address = bootstrap.gather([host, store.port] if store is not None else None)[0]
    if store is None:
        store = _tcp_store(address[0], address[1], size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
