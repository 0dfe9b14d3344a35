"""Collectives on device tensors, on ranks that share a GPU: `mpiexec -n 2 python -m tests.gpu.ranks KIND`."""

import sys

import torch

from deepex.comm import connect
from deepex.comm.mpi import MpiCommunicator


def check(comm: object, tensor: torch.Tensor) -> None:
    """Sum and broadcast, in place on the device."""
    address = tensor.data_ptr()
    comm.sum(tensor)
    expected = torch.arange(tensor.numel(), device="cuda") % 97 * comm.size + sum(range(comm.size))
    assert torch.equal(tensor, expected.to(tensor.dtype)), tensor[:5]
    assert tensor.data_ptr() == address
    tensor.fill_(comm.rank)
    comm.broadcast(tensor, comm.size - 1)
    assert tensor.eq(comm.size - 1).all()


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "staged":
        comm = MpiCommunicator(cuda_aware=False)
    elif kind == "mpi":
        comm = MpiCommunicator()
    else:
        comm = connect(kind, device="cuda")
    for count in (5, 1_000_003):
        check(comm, (torch.arange(count, device="cuda") % 97 + comm.rank).float())
    assert len(comm.gather({"rank": comm.rank})) == comm.size
    if comm.rank == 0:
        print(f"{kind} on {comm.size} rank(s): well; CUDA-aware: {getattr(comm, 'cuda_aware', None)}")
    comm.close()
