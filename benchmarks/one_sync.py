"""One sync of ResNet-50 (25.6 M parameters) on two ranks: what DeepEx adds to a bare MPI_Allreduce, and what others do instead.

    python benchmarks/one_sync.py

All go through the same MPI library, with `MpiCommunicator`'s thread level and variables, in the same two processes, in turns: a
barrier, the sync, the slower rank's time. Every contestant's memory is written anew before its turn, as an update would.

DeepEx weights each replica by its samples as it sums, in memory that the ranks share; "not shared" weights first and then does one
Allreduce, as it must between nodes. The others sum without weights: one Allreduce in place on a tensor of as many bytes; one for
each parameter and buffer (torchft, Accelerate), and the same with the division that makes a mean of it; all concatenated into a new
buffer, one Allreduce, and the parameters pointed into that buffer (PyTorch's PeriodicModelAverager). For information: momentum
averaged too, which has twice the bytes. All have the heap that DeepEx sets; a bare Allreduce takes 1.6 times as long without.
The environment goes on to the ranks: MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=auto shows MPICH's own choice.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from deepex.comm.early import load_mpi

load_mpi()

import torch
from torch import nn

import bench
from deepex import nets
from deepex.arena.arena import Arena
from deepex.comm.base import Communicator
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.together import abort_on_failure
from deepex.sync.agreement import Agreement
from deepex.sync.mean import InPlace
from deepex.sync.synced_slice import SyncedSlice


def build() -> nn.Module:
    torch.manual_seed(1)
    return nets.build("resnet50", channels=3, size=(224, 224), classes=1000)


def timed(prepare: Callable[[], object], work: Callable[[], object], world: Any) -> float:
    """Seconds of the slower rank, from a barrier on."""
    prepare()
    world.Barrier()
    began = perf_counter()
    work()
    return max(world.allgather(perf_counter() - began))


class Separate:
    """A network whose tensors lie where PyTorch put them, synced without an arena."""

    def __init__(self, world: Any, mpi: Any) -> None:
        self._world, self._mpi, self._network = world, mpi, build()
        buffers = [buffer for buffer in self._network.buffers() if buffer.is_floating_point()]
        self._tensors = [*self._network.parameters(), *buffers]

    def write(self) -> None:
        """Write every tensor."""
        for tensor in self._tensors:
            tensor.data.fill_(0.01)

    def sum_each(self) -> None:
        """One Allreduce per tensor."""
        for tensor in self._tensors:
            self._world.Allreduce(self._mpi.IN_PLACE, tensor.data.numpy())

    def mean_each(self) -> None:
        """One Allreduce and one division per tensor."""
        for tensor in self._tensors:
            self._world.Allreduce(self._mpi.IN_PLACE, tensor.data.numpy())
            tensor.data.div_(2)

    def sum_concatenated(self) -> None:
        """One Allreduce of a new buffer, into which the tensors are pointed afterwards."""
        flat = torch.cat([tensor.data.reshape(-1) for tensor in self._tensors])
        self._world.Allreduce(self._mpi.IN_PLACE, flat.numpy())
        for tensor, values in zip(self._tensors, flat.split([tensor.numel() for tensor in self._tensors]), strict=True):
            tensor.data = values.view_as(tensor)


def agreement_on(agreed: torch.Tensor) -> Agreement:
    """What the learner builds for one replica per rank."""
    all_parts = slice(0, agreed.numel())
    return InPlace(SyncedSlice(agreed=agreed, buffers=slice(0, 1), weights=slice(1, agreed.numel()), own=all_parts, request=0))


def sync(agreement: Agreement, comm: Communicator, share: float) -> None:
    agreement.add(0, share)
    agreement.reach(comm, request=0.0, rate=0.0)


def measure_syncs(arena: Arena, repeats: int, comm: MpiCommunicator, mpi: Any) -> dict[str, list[float]]:
    """Seconds of each way to sync."""
    world = mpi.COMM_WORLD
    plain = torch.full((arena.model.numel(),), 0.01)
    apart, memory = torch.full_like(plain, 0.01), plain.numpy()
    separate, concatenated = Separate(world, mpi), Separate(world, mpi)
    model, with_momentum = arena.model, arena.model_and(1)
    contestants = {
        "DeepEx": (lambda: model.fill_(0.01), partial(sync, agreement_on(model), comm, 0.5)),
        "DeepEx, not shared": (lambda: apart.fill_(0.01), partial(sync, agreement_on(apart), comm, 0.5)),
        "one Allreduce": (lambda: plain.fill_(0.01), lambda: world.Allreduce(mpi.IN_PLACE, memory)),
        "an Allreduce per tensor": (separate.write, separate.sum_each),
        "an Allreduce per tensor, divided": (separate.write, separate.mean_each),
        "concatenate, Allreduce, point back": (concatenated.write, concatenated.sum_concatenated),
        "DeepEx, momentum averaged": (
            lambda: with_momentum.fill_(0.01),
            partial(sync, agreement_on(with_momentum), comm, 0.5),
        ),
    }
    return bench.in_turns({name: partial(timed, *both, world) for name, both in contestants.items()}, repeats)


def show_syncs(found: dict[str, list[float]], arena: Arena) -> dict[str, dict[str, float]]:
    """Print how DeepEx's way compares with every other; give the ratios."""
    bars = {"one Allreduce": "at most 1.1", "an Allreduce per tensor": "below 1"}
    ratios: dict[str, dict[str, float]] = {}
    rows = []
    for name, seconds in found.items():
        size = (arena.model_and(1) if name == "DeepEx, momentum averaged" else arena.model).nbytes
        ratios[name] = bench.ratio(found["DeepEx"], seconds)
        shown = bench.show_ratio(ratios[name])
        rows.append([name, f"{size / 1e6:.1f}", f"{statistics.median(seconds) * 1e3:.1f}", shown, bars.get(name, "")])
    bench.print_table(
        f"one sync of ResNet-50, {arena.num_parameters / 1e6:.1f} M weights, 2 ranks; {bench.LEGEND}",
        ["a sync by", "MB", "ms (median)", "DeepEx / this", "bar"],
        rows,
    )
    return ratios


def ranks(repeats: int, *, keep: bool) -> None:
    """What each of the two processes does."""
    comm = MpiCommunicator()
    from mpi4py import MPI

    with abort_on_failure(comm, print, print):
        arena = Arena(build(), torch.device("cpu"), zeros=comm.zeros)
        syncs = measure_syncs(arena, repeats, comm, MPI)
    if comm.rank:
        return
    result = {
        "mpi": MPI.Get_library_version().splitlines()[0],
        "mpi_thread_level": MPI.Query_thread(),
        "mpi_variables": {name: value for name, value in os.environ.items() if name.startswith(("MPIR_CVAR_", "OMPI_MCA_"))},
        "parameters": arena.num_parameters,
        "bytes": arena.model.nbytes,
        "bytes_with_momentum": arena.model_and(1).nbytes,
        "sync_seconds": syncs,
        "deepex_over": show_syncs(syncs, arena),
    }
    bench.write_record("one_sync", result, keep=keep)


if __name__ == "__main__":
    bench.on_two_ranks(__doc__, ranks, repeats=60)
