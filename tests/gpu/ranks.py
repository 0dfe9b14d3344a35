"""Collectives on device tensors, on ranks that share a GPU: `mpiexec -n 2 python -m tests.gpu.ranks KIND`."""

import sys

import torch

from deepex.comm import Background, connect
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


def check_background(comm: object) -> None:
    """Sums that wait for what the caller's stream still has to do, and that its stream waits for: the host does neither."""
    background = Background(comm)
    for count in (5, 1_000_003):
        source = (torch.arange(count, device="cuda") % 97 + comm.rank).float()
        expected = source.clone()
        comm.sum(expected)
        tensor, found = torch.full_like(source, torch.nan), torch.empty_like(source)
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        tensor.copy_(source)
        pending = background.sum(tensor)
        pending.wait()
        found.copy_(tensor)
        assert torch.equal(found, expected), (count, found[:5], expected[:5])
        assert pending.seconds > 0
    check_long_work(background)
    background.close()


def check_long_work(background: Background) -> None:
    """The caller's stream waits for what the thread's is still at when the thread itself has done its part."""
    tensor = torch.zeros(1000, device="cuda")

    def work(_: object) -> None:
        torch.cuda._sleep(500_000_000)
        tensor.fill_(1.0)

    pending = background.run(work)
    pending.wait()
    assert tensor.clone().eq(1).all()


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
    check_background(comm)
    assert len(comm.gather({"rank": comm.rank})) == comm.size
    if comm.rank == 0:
        print(f"{kind} on {comm.size} rank(s): well; CUDA-aware: {getattr(comm, 'cuda_aware', None)}")
    comm.close()
