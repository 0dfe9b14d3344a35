"""One sync of ResNet-50 (25.6 M parameters) over gloo on 2 and on 4 ranks: DeepEx against three libraries that do local SGD.

    pip install 'deepex[peers]' && python benchmarks/sync_peers.py

What each library is and how it is called stands in peers/local_sgd.py; one that is not installed is left out. All sync the same
network on the same ranks, one thread each, in turns: every tensor is written anew, as an update would; a barrier; the sync; the
slowest rank's time. A rank that waits sleeps (no MPI call is made meanwhile), which matters where 4 ranks share 2 cores.

DeepEx stands twice: in memory that the ranks of a node share, where gloo only carries its two signals; and in each rank's own
memory, where gloo carries everything, as between nodes. It weights each replica and averages batch-norm statistics; the others
divide by the number of ranks, and what they do with the statistics is measured.

Beside the times: whether different running means became their mean; how many collectives a sync calls; and by how much it
makes a rank's resident set rise at most (memory.py), the largest over the ranks, the median of three syncs. Meanwhile the
heap returns what is freed at once, so that a copy shows every time. What is taken once and kept does not: the first sync is not
counted, in which a rank also maps its part of the memory that others share with it. The times are then taken with the heap of a
DeepEx run, which keeps what is freed: whoever makes copies gains most from that. On aarch64, where PyTorch has a heap of its own
that is told so when it is loaded, memory and times come from two jobs.
"""

import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from unittest import mock

from deepex.comm.early import load_mpi

load_mpi()

import torch
import torch.distributed as dist
from torch import nn

import bench
from deepex.comm import Communicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.comm.launch import launch
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.together import abort_on_failure
from deepex.errors import FailureError
from deepex.machine.heap import give_back_heap, keep_tensors
from memory import growth
from one_sync import build
from peers.local_sgd import DEEPEX, GLOO_ALONE, MAKERS, Contestant, Maker
from peers.workload import Unavailable

RANKS: Final = (2, 4)
_COLLECTIVES: Final = ("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "broadcast", "reduce", "barrier")
_MEMORY_REPEATS: Final = 3
_MMAP_THRESHOLD: Final = -3  # malloc.h
GIVES_BACK: Final = {"MIMALLOC_PURGE_DELAY": "0"}  # PyTorch's own heap, at once
MB: Final = 1e6


def statistics_of(network: nn.Module) -> list[torch.Tensor]:
    """The buffers of batch norm that have a mean."""
    return [buffer for buffer in network.buffers() if buffer.is_floating_point()]


def write(network: nn.Module, value: float) -> None:
    """Write every tensor, wherever the last sync has put it."""
    for parameter in network.parameters():
        parameter.data.fill_(value)
    for buffer in statistics_of(network):
        buffer.fill_(value)


def holds(tensors: list[torch.Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


def averages_statistics(contestant: Contestant, comm: Communicator) -> bool:
    """Whether a sync averages batch norm's running means and variances too. One that leaves the weights unequal is an error."""
    write(contestant.network, float(comm.rank))
    contestant.sync()
    mean = (comm.size - 1) / 2
    parameters = [parameter.data for parameter in contestant.network.parameters()]
    if not all(comm.gather(holds(parameters, mean))):
        raise FailureError(f"after a sync of 0 to {comm.size - 1}, some weight is not {mean}")
    return all(comm.gather(holds(statistics_of(contestant.network), mean)))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count this process's collectives, whoever calls them, and the bytes of all-reduces: all go through `ProcessGroup`."""
    found: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting_call(group: Any, *arguments: Any, **options: Any) -> Any:
            found["calls"] += 1
            found["bytes"] += sum(tensor.nbytes for tensor in arguments[0]) if name == "allreduce" else 0
            return call(group, *arguments, **options)

        return counting_call

    patches = {name: counting(name, getattr(dist.ProcessGroup, name)) for name in _COLLECTIVES}
    with mock.patch.multiple(dist.ProcessGroup, **patches):
        yield found


def give_back_at_once() -> None:
    """Make every block of 128 KiB and more the system's again as soon as it is freed: glibc would learn to keep some of them."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 128 << 10)


def extra_bytes(contestant: Contestant, comm: Communicator) -> int:
    """What a sync takes at most beside what was there before, on the rank where that is most."""
    write(contestant.network, 0.01)
    give_back_heap()
    comm.barrier()
    return max(comm.gather(growth(contestant.sync)))


def describe(contestant: Contestant, comm: Communicator) -> dict[str, Any]:
    """All that is not a time."""
    averaged = averages_statistics(contestant, comm)
    with counted() as found:
        contestant.sync()
    extra = [extra_bytes(contestant, comm) for _ in range(_MEMORY_REPEATS)]
    return {
        "averages_batch_norm": averaged,
        "collectives": found["calls"],
        "all_reduced_bytes": found["bytes"],
        "extra_bytes": extra,
    }


def timed(contestant: Contestant, comm: Communicator) -> float:
    """Seconds of the slowest rank, from a barrier on."""
    write(contestant.network, 0.01)
    comm.barrier()
    began = perf_counter()
    contestant.sync()
    return max(comm.gather(perf_counter() - began))


def make_all(makers: dict[str, Maker], build_network: Callable[[], nn.Module], comm: Communicator) -> dict[str, Contestant]:
    """Every contestant that is installed, on a network of its own."""
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make(build_network(), comm)
        except Unavailable as error:
            if comm.rank == 0:
                print(f"left out: {error}", flush=True)
    return found


def measure(makers: dict[str, Maker], build_network: Callable[[], nn.Module], comm: Communicator, repeats: int) -> dict[str, Any]:
    """Everything about one number of ranks, the same on all of them."""
    torch.set_num_threads(1)
    give_back_at_once()
    contestants = make_all(makers, build_network, comm)
    facts = {name: describe(contestant, comm) for name, contestant in contestants.items()}
    bench.settle(threads=1)
    turns = {name: partial(timed, contestant, comm) for name, contestant in contestants.items()}
    seconds = bench.in_turns(turns, repeats, warm_ups=3)  # as many as the heap needs to have all that is ever freed
    network = contestants[DEEPEX].network
    weights = list(network.parameters())
    for contestant in contestants.values():
        contestant.close()
    return {
        "ranks": comm.size,
        "parameters": sum(weight.numel() for weight in weights),
        "model_bytes": sum(tensor.nbytes for tensor in (*weights, *statistics_of(network))),
        "facts": facts,
        "seconds": seconds,
        "deepex_over": {name: bench.ratio(seconds[DEEPEX], values) for name, values in seconds.items()},
        "gloo_alone_over": {name: bench.ratio(seconds[GLOO_ALONE], values) for name, values in seconds.items()},
    }


def row(name: str, found: dict[str, Any]) -> list[object]:
    """A contestant's row of the table."""
    facts = found["facts"][name]
    extra = statistics.median(facts["extra_bytes"])
    return [
        found["ranks"],
        name,
        f"{statistics.median(found['seconds'][name]) * 1e3:.1f}",
        bench.show_ratio(found["deepex_over"][name]),
        bench.show_ratio(found["gloo_alone_over"][name]),
        f"{extra / MB:.1f}",
        f"{extra / found['model_bytes']:.0%}",
        facts["collectives"],
        "averaged" if facts["averages_batch_norm"] else "left as they are",
    ]


def show(results: list[dict[str, Any]]) -> None:
    first = results[0]
    columns = [
        "ranks",
        "a sync by",
        "ms (median)",
        "DeepEx / this (bar 1)",
        "DeepEx, gloo alone / this",
        "extra MB",
        "of the model",
        "collectives",
        "batch-norm statistics",
    ]
    bench.print_table(
        f"one sync of ResNet-50 over gloo, {first['parameters'] / 1e6:.3f} M parameters, {first['model_bytes'] / MB:.1f} MB, "
        f"one thread per rank, {len(first['seconds'][DEEPEX])} turns; {bench.LEGEND}",
        columns,
        [row(name, found) for found in results for name in found["facts"]],
    )


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torchft", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def rank(answer: str, repeats: int) -> None:
    """What each process of a job does; rank 0 leaves what was found in the file `answer`."""
    mpi = MpiCommunicator()
    comm = DistributedCommunicator("gloo", bootstrap=mpi)
    with abort_on_failure(comm, print, print):
        found = measure(MAKERS, build, comm, repeats)
    if comm.rank == 0:
        Path(answer).write_text(json.dumps(found), encoding="utf-8")
    comm.close()


def run_job(ranks: int, repeats: int) -> dict[str, Any]:
    """All about one number of ranks."""
    environ = dict(os.environ)
    keep_tensors(environ)
    found = start_ranks(ranks, repeats, environ)
    if platform.machine() == "aarch64":
        found["facts"] = start_ranks(ranks, 1, {**environ, **GIVES_BACK})["facts"]
    return found


def start_ranks(ranks: int, repeats: int, environ: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        case = json.dumps({"answer": str(answer), "repeats": repeats})
        code = launch(ranks, [sys.executable, __file__, "--case", case], environ)
        if code:
            sys.exit(code)
        return json.loads(answer.read_text(encoding="utf-8"))


def main() -> None:
    options = bench.arguments(__doc__, repeats=16)
    results = [run_job(ranks, options.repeats) for ranks in RANKS]
    show(results)
    bench.write_record("sync_peers", {"peers": versions(), "results": results}, keep=options.keep)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        rank(**json.loads(sys.argv[2]))
    else:
        main()
