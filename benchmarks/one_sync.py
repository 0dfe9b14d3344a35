"""One sync of ResNet-50 (25.6 M parameters) on two ranks: what DeepEx adds to a bare MPI_Allreduce, and what others do instead.

    python benchmarks/one_sync.py

All go through the same MPI library, in the same two processes, in turns: a barrier, the sync, the slower rank's time. None of them
divides by the number of ranks: DeepEx weights the replicas within the last update before a sync, and what that costs is measured on
its own, against an update without it and against a pass over the weights for it alone.
Every contestant's memory is written anew before its turn, as the update before a sync would.

The contestants: `Agreement.reach` on the arena; one Allreduce in place on a tensor of as many bytes; one Allreduce for each
parameter and buffer (torchft, Accelerate); all of them concatenated into a new buffer, one Allreduce, and the parameters pointed
into that buffer (PyTorch's PeriodicModelAverager); Allreduces in place on pieces of 4 MB of one tensor, which some of MPI's
algorithms do faster; and `Agreement.reach` with momentum averaged, which has twice the bytes.
The thread level is that of `MpiCommunicator`, for all; the environment goes on to the ranks, so that the library's own choices can
be compared by running twice: MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=mpir python benchmarks/one_sync.py
"""

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

import bench
from deepex import nets
from deepex.comm.launch import launch
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.together import abort_on_failure
from deepex.engine.arena import Arena
from deepex.engine.optim import OptimConfig, Optimiser
from deepex.sync.agreement import Agreement, make_agreement

PIECE = 1 << 20  # elements


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

    def sum_concatenated(self) -> None:
        """One Allreduce of a new buffer, into which the tensors are pointed afterwards."""
        flat = torch.cat([tensor.data.reshape(-1) for tensor in self._tensors])
        self._world.Allreduce(self._mpi.IN_PLACE, flat.numpy())
        for tensor, values in zip(self._tensors, flat.split([tensor.numel() for tensor in self._tensors]), strict=True):
            tensor.data = values.view_as(tensor)


def sum_pieces(pieces: list[Any], world: Any, mpi: Any) -> None:
    for piece in pieces:
        world.Allreduce(mpi.IN_PLACE, piece)


def agreement_on(arena: Arena, agreed: torch.Tensor) -> Agreement:
    """What the learner builds for one replica per rank."""
    return make_agreement(agreed, own=agreed, small=arena.buffers, request=0, replicas_per_rank=1, deterministic=False)


def measure_syncs(arena: Arena, repeats: int, comm: MpiCommunicator, mpi: Any) -> dict[str, list[float]]:
    """Seconds of each way to sync."""
    world = mpi.COMM_WORLD
    plain = torch.full((arena.model.numel(),), 0.01)
    memory = plain.numpy()
    separate, concatenated = Separate(world, mpi), Separate(world, mpi)
    pieces = [piece.numpy() for piece in torch.full((arena.model.numel(),), 0.01).split(PIECE)]
    model, with_momentum = arena.model, arena.model_and_momentum
    contestants = {
        "DeepEx": (lambda: model.fill_(0.01), partial(agreement_on(arena, model).reach, comm, 0.0)),
        "one Allreduce": (lambda: plain.fill_(0.01), lambda: world.Allreduce(mpi.IN_PLACE, memory)),
        "an Allreduce per tensor": (separate.write, separate.sum_each),
        "concatenate, Allreduce, point back": (concatenated.write, concatenated.sum_concatenated),
        "an Allreduce per 4 MB": (lambda: [piece.fill(0.01) for piece in pieces], lambda: sum_pieces(pieces, world, mpi)),
        "DeepEx, momentum averaged": (
            lambda: with_momentum.fill_(0.01),
            partial(agreement_on(arena, with_momentum).reach, comm, 0.0),
        ),
    }
    return bench.in_turns({name: partial(timed, *both, world) for name, both in contestants.items()}, repeats)


def measure_weighting(arena: Arena, repeats: int, world: Any) -> dict[str, list[float]]:
    """Seconds of the update before a sync, with and without the weighting, and of a pass for the weighting alone."""
    optimiser = Optimiser(OptimConfig(rate=0.05, weight_decay=5e-4), arena)

    def prepare() -> None:
        arena.memory.fill_(0.01)

    contestants = {
        "update": lambda: optimiser.update(0.05),
        "update, weighted": lambda: optimiser.update(0.05, 0.5),
        "a pass of its own": lambda: arena.weights.mul_(0.5),
    }
    return bench.in_turns({name: partial(timed, prepare, work, world) for name, work in contestants.items()}, repeats)


def show_syncs(found: dict[str, list[float]], arena: Arena, blocks: int) -> dict[str, dict[str, float]]:
    """Print how every other way compares with DeepEx's; give the ratios."""
    bars = {"one Allreduce": "at most 1.1", "an Allreduce per tensor": "below 1"}
    ratios, rows = {}, []
    for name, seconds in found.items():
        size = (arena.model_and_momentum if name == "DeepEx, momentum averaged" else arena.model).nbytes
        ratios[name] = bench.ratio(found["DeepEx"], seconds, blocks=blocks)
        shown = "" if name == "DeepEx" else bench.show_ratio(ratios[name])
        middle = statistics.median(seconds)
        rows.append([name, f"{size / 1e6:.1f}", f"{middle * 1e3:.1f}", f"{size / middle / 1e9:.2f}", shown, bars.get(name, "")])
    columns = ["a sync by", "MB", "ms (median)", "GB/s", "DeepEx / this (bars 1.1 and 1)", "bar"]
    bench.print_table(
        f"one sync of ResNet-50, {arena.num_parameters / 1e6:.1f} M weights, 2 ranks; fast quarter of turns (range over fifths)",
        columns,
        rows,
    )
    return ratios


def show_weighting(found: dict[str, list[float]], blocks: int) -> dict[str, dict[str, float]]:
    """Print what the weighting costs, in units of an update."""
    ratios = {name: bench.ratio(found[name], found["update"], blocks=blocks) for name in found if name != "update"}
    within, alone = ratios["update, weighted"]["ratio"] - 1, ratios["a pass of its own"]["ratio"]
    rows = [
        [name, f"{statistics.median(seconds) * 1e3:.2f}", bench.show_ratio(ratios[name]) if name in ratios else ""]
        for name, seconds in found.items()
    ]
    bench.print_table(
        "what weighting by samples costs, once per sync, both ranks at the same time",
        ["pass", "ms (median)", "this / update"],
        rows,
    )
    print(f"within the update it adds {within:.1%} of an update; a pass of its own would add {alone:.1%}")
    return ratios


def ranks(repeats: int, *, keep: bool) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    comm = MpiCommunicator()
    from mpi4py import MPI

    with abort_on_failure(comm, print, print):
        arena = Arena(build(), torch.device("cpu"))
        syncs = measure_syncs(arena, repeats, comm, MPI)
        weighting = measure_weighting(arena, repeats, MPI.COMM_WORLD)
    if comm.rank:
        return
    blocks = min(5, repeats)
    result = {
        "mpi": MPI.Get_library_version().splitlines()[0],
        "mpi_thread_level": MPI.Query_thread(),
        "mpi_variables": {name: value for name, value in os.environ.items() if name.startswith(("MPIR_CVAR_", "OMPI_MCA_"))},
        "parameters": arena.num_parameters,
        "bytes": arena.model.nbytes,
        "bytes_with_momentum": arena.model_and_momentum.nbytes,
        "sync_seconds": syncs,
        "deepex_over": show_syncs(syncs, arena, blocks),
        "weighting_seconds": weighting,
        "over_update": show_weighting(weighting, blocks),
    }
    bench.write_record("one_sync", result, keep=keep)


def main() -> None:
    options = bench.arguments(__doc__, repeats=60, rank_role=0)
    if options.rank_role:
        ranks(options.repeats, keep=options.keep)
    else:
        sys.exit(launch(2, [sys.executable, *sys.argv, "--rank-role", "1"], os.environ))


if __name__ == "__main__":
    main()
