"""Two ranks against one, and against PyTorch's DistributedDataParallel (DDP) over gloo on the same two ranks.

    python benchmarks/two_ranks.py

One job of two processes, one thread each, runs the contestants in turns: an epoch by rank 0 alone over all the samples, while rank
1 sleeps; half an epoch by each rank on its own, without a word to the other, which is the most that the machine gives; an epoch by
both ranks with one sync at its end; one by both with a sync of the gradients in every step; one by both under DDP. A time is that
of the slower rank, from a barrier before to a barrier after. It needs two cores that nobody else uses: ranks that wait for each
other poll, so a third busy process slows the contestants that wait most, by far more than its share.

DDP gets what is best for it: samples in memory, standardised once, as float32 (`bare_loop` of one_rank.py), fused SGD, gradients as
views of its buckets, no broadcast of batch-norm statistics; and, found by trial for each network: the memory order, `static_graph`,
and gradients set to None or to zero. Batch per rank, samples and number of steps are those of DeepEx.
"""

import dataclasses
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from deepex.comm.early import load_mpi

load_mpi()

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import bench
import deepex
from deepex.comm import Communicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import abort_on_failure
from deepex.data.feeds.order import epoch_order
from deepex.recipes.network import build_network
from deepex.record.clock import HostClock
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job, try_order
from deepex.training.learner import Learner
from one_rank import fused_sgd, small_data, standardised

WORKLOADS = {
    "lenet": (2880, 1),
    "lenet-caffe": (1920, 1),
    "resnet18": (512, 4),
}  # images, and by what the number of turns is divided
ORDERS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
Epoch = Callable[[], None]
# DDP would otherwise send rank 0's batch-norm statistics before every step. PyTorch 2.13 has a new name for that.
_NO_BUFFERS = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def learner_epochs(config: RunConfig, comm: Communicator) -> tuple[Epoch, Learner]:
    """The learner's epochs on the ranks of `comm`, their syncs and the reading of their sums included."""
    learner = Learner(build(make_job(config, comm, build_network), comm, clock=HostClock()))
    numbers = itertools.count()

    def epoch() -> None:
        bench.run_epoch(learner, next(numbers))
        learner.parts.runner.sums.tolist()

    return epoch, learner


def ddp_epochs(
    config: RunConfig, comm: Communicator, *, order: str, static_graph: bool, set_to_none: bool, steps: int | None = None
) -> Epoch:
    """Epochs of this rank's shard under DDP, or their first `steps` steps."""
    job = make_job(config, comm, build_network)
    shards = job.shards
    inputs, labels = standardised(job, shards.bounds(comm.rank), ORDERS[order])
    network = DistributedDataParallel(
        job.network.to(memory_format=ORDERS[order]).train(),
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        **_NO_BUFFERS,
    )
    optimiser = fused_sgd(network, config)
    state = {"epoch": 0}

    def epoch() -> None:
        span, bounds = shards.bounds(comm.rank), job.dataset.part("train").bounds
        keys = {"seed": config.seed, "epoch": state["epoch"], "sample_bytes": job.dataset.manifest.sample_bytes}
        order = torch.from_numpy(epoch_order(span, bounds, replica=comm.rank, **keys) - span[0])
        state["epoch"] += 1
        total = torch.zeros(())
        for batch in order.split(config.batch)[:steps]:
            optimiser.zero_grad(set_to_none=set_to_none)
            loss = functional.cross_entropy(network(inputs.index_select(0, batch)), labels[batch])
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(batch)
        total.item()

    return epoch


def best_ddp(config: RunConfig, comm: MpiCommunicator, world: Any) -> dict[str, Any]:
    """The settings in which DDP is fastest for this network, one after another, by the first steps of an epoch in turns."""
    best: dict[str, Any] = {"order": "contiguous", "static_graph": False, "set_to_none": True}
    choices = {"order": list(ORDERS), "static_graph": [False, True], "set_to_none": [True, False]}
    for name, values in choices.items():
        epochs = {value: ddp_epochs(config, comm, **{**best, name: value}, steps=3) for value in values}
        found = bench.in_turns({value: partial(timed, epoch, world) for value, epoch in epochs.items()}, 3)
        best[name] = min(values, key=lambda value: min(found[value]))
    return best


def timed(epoch: Epoch, world: Any, *, alone: bool = False) -> float:
    """Seconds of the slower rank from barrier to barrier. `alone`: rank 0 works, the others sleep meanwhile."""
    world.Barrier()
    began = perf_counter()
    if not alone or world.rank == 0:
        epoch()
    if not alone:
        world.Barrier()
    seconds = perf_counter() - began
    _sleep_until_all_came(world)
    return max(world.allgather(seconds if not alone or world.rank == 0 else 0.0))


def _sleep_until_all_came(world: Any) -> None:
    """A barrier that leaves the core to others: MPI's own would poll, and take from rank 0 what it measures."""
    request = world.Ibarrier()
    while not request.Test():
        sleep(0.002)


def compare(net: str, samples: int, repeats: int, comm: MpiCommunicator, world: Any) -> tuple[list[object], dict[str, Any]]:
    """A row of the table, and its record."""
    with _shared_data(samples, comm) as data, _shared_data(samples // 2, comm) as half:
        config = deepex.recipe("fashion", {"net": net, "batch": 32, "threads": 1, "data": data})
        job = try_order(make_job(config, comm, build_network), comm)
        config = job.config
        by_gradients = deepex.recipe(
            "fashion", {"net": net, "batch": 32, "threads": 1, "data": data, "layout": config.layout, "sync.strategy": "gradients"}
        )
        one = learner_epochs(config, SoloCommunicator())[0] if comm.rank == 0 else (lambda: None)
        apart, _ = learner_epochs(dataclasses.replace(config, data=half), SoloCommunicator())
        two, learner = learner_epochs(config, comm)
        gradients, _ = learner_epochs(by_gradients, comm)
        best = best_ddp(config, comm, world)
        ddp = ddp_epochs(config, comm, **best)
        sync_seconds: list[float] = []

        def two_ranks() -> float:
            seconds = timed(two, world)
            phases = learner.parts.clock.seconds()
            sync_seconds.append(min(world.allgather(phases["sync"])))  # the later rank's: none of it is waiting
            return seconds

        contestants = {
            "one rank": lambda: timed(one, world, alone=True),
            "each on its own": lambda: timed(apart, world),
            "two ranks": two_ranks,
            "two ranks, gradients": lambda: timed(gradients, world),
            "DDP": lambda: timed(ddp, world),
        }
        found = bench.in_turns(contestants, repeats)
    speedup = bench.ratio(found["one rank"], found["two ranks"])
    ceiling = bench.ratio(found["one rank"], found["each on its own"])
    over_ddp = bench.ratio(found["DDP"], found["two ranks"])
    gradients_over_ddp = bench.ratio(found["DDP"], found["two ranks, gradients"])
    speed = {name: samples / statistics.median(seconds) for name, seconds in found.items()}
    sync_share = statistics.median(sync_seconds[-repeats:]) / statistics.median(found["two ranks"])
    settings = f"{best['order']}{', static graph' * best['static_graph']}, gradients {'None' if best['set_to_none'] else 'zeroed'}"
    row = [
        net,
        samples,
        f"{speed['one rank']:,.0f}",
        f"{speed['two ranks']:,.0f}",
        f"{sync_share:.1%}",
        bench.show_ratio(speedup),
        bench.show_ratio(ceiling),
        f"{speed['DDP']:,.0f}",
        settings,
        bench.show_ratio(over_ddp),
        bench.show_ratio(gradients_over_ddp),
    ]
    record = {
        "seconds": found,
        "sync_seconds": sync_seconds[-repeats:],
        "layout": config.layout,
        "ddp": best,
        "two_over_one": speedup,
        "ceiling": ceiling,
        "deepex_over_ddp": over_ddp,
        "deepex_gradients_over_ddp": gradients_over_ddp,
    }
    return row, record


@contextmanager
def _shared_data(samples: int, comm: MpiCommunicator) -> Iterator[str]:
    """The dataset that rank 0 packs for both."""
    data = comm.gather(small_data(samples) if comm.rank == 0 else None)[0]
    try:
        yield data
    finally:
        if comm.rank == 0 and Path(data).parent.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(Path(data).parent)


def ranks(repeats: int, *, keep: bool) -> None:
    """What each of the two processes does."""
    comm = MpiCommunicator()
    from mpi4py import MPI

    with abort_on_failure(comm, print, print):
        gloo = DistributedCommunicator("gloo", bootstrap=comm)
        rows, result = [], {}
        for net, (samples, fewer) in WORKLOADS.items():
            row, result[net] = compare(net, samples, max(1, repeats // fewer), comm, MPI.COMM_WORLD)
            rows.append(row)
        gloo.close()
    if comm.rank:
        return
    columns = [
        "network",
        "images",
        "1 rank img/s",
        "2 ranks img/s",
        "sync's share",
        "2 ranks / 1 rank (bar 1.8)",
        "2 that do not talk / 1 rank",
        "DDP img/s",
        "DDP's best",
        "DeepEx, sync per epoch / DDP (bar 1)",
        "DeepEx, gradients / DDP",
    ]
    title = f"images per second, one thread per rank, batch 32 per rank, up to {repeats} turns; {bench.LEGEND}"
    bench.print_table(title, columns, rows)
    bench.write_record("two_ranks", {"threads": 1, "results": result}, keep=keep)


if __name__ == "__main__":
    bench.on_two_ranks(__doc__, ranks, repeats=20)
