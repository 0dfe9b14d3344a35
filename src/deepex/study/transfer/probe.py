"""What is timed: one way that bytes take, for any size, on ranks of any communicator.

    probe = memory()
    operation = probe.make(comm, 1 << 20)       # collective over the ranks that measure it
    operation()                                 # copies a mebibyte

Those of a GPU are in probe_gpu.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepex.comm import Communicator
from deepex.comm.base import own_zeros
from deepex.errors import CommError

HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """`make` gives the operation for a communicator and a number of bytes; it moves them `transfers` times, one after another.

    `traffic` is what each rank must send at least, as a share of the bytes: 2(P - 1)/P in an all-reduce of P ranks.
    """

    path: str
    kind: str
    make: Callable[[Communicator, int], Callable[[], object]]
    device: torch.device = HOST
    transfers: int = 1
    traffic: float | None = None
    note: str = ""

    def settle(self) -> None:
        """Wait for what the operation has left on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory(ranks: int = 1) -> Probe:
    """Copies within host memory, by all ranks at once: what bounds all else on a machine without accelerators."""

    def make(_comm: Communicator, size: int) -> Callable[[], object]:
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        return lambda: target.copy_(source)

    path = "memory" if ranks == 1 else f"memory, {ranks} ranks at once"
    return Probe(path=path, kind="memory", make=make, note=f"{torch.get_num_threads()} thread(s); a byte is read and written")


def ping_pong(kind: str, pair: tuple[int, int], *, device: torch.device, note: str) -> Probe:
    """A message to the other one of two ranks and back: two transfers."""

    def make(comm: Communicator, size: int) -> Callable[[], object]:
        tensor = own_zeros(size, torch.uint8, device)
        other = 1 - comm.rank
        calls = (comm.send, comm.receive) if comm.rank == 0 else (comm.receive, comm.send)

        def bounce() -> None:
            for call in calls:
                call(tensor, other)

        return bounce

    path = f"rank-rank {kind}, {pair[0]} and {pair[1]}{_where(device)}"
    return Probe(path=path, kind="point-to-point", make=make, device=device, transfers=2, note=note)


def all_reduce(kind: str, ranks: int, *, device: torch.device, own: bool = False) -> Probe:
    """The sum that a sync calls, in the memory that a sync has; with `own` in memory of each rank alone, by the library."""

    def make(comm: Communicator, size: int) -> Callable[[], object]:
        tensor = (own_zeros if own else comm.zeros)(size // torch.float32.itemsize, torch.float32, device)
        _check_sum(comm, tensor)
        return lambda: comm.sum(tensor)

    path = f"all-reduce {kind}, {ranks} ranks{_where(device)}"
    return Probe(
        path=path + ", own memory" if own else path,
        kind="all-reduce",
        make=make,
        device=device,
        traffic=2 * (ranks - 1) / ranks,
        note="by the library" if own else "as a sync does it",
    )


def _check_sum(comm: Communicator, tensor: torch.Tensor) -> None:
    """A sum that is wrong is not worth timing. Zeros are left, which stay zeros however often they are summed."""
    tensor.fill_(comm.rank + 1)
    comm.sum(tensor)
    expected = comm.size * (comm.size + 1) / 2
    if not bool(tensor.eq(expected).all()):
        raise CommError(f"an all-reduce of {tensor.nbytes} bytes gave {tensor[0].item()} instead of {expected}: check the MPI")
    tensor.zero_()


def _where(device: torch.device) -> str:
    return "" if device.type == "cpu" else ", device memory"
