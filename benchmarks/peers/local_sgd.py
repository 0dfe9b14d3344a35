"""One sync of local SGD, as DeepEx does it and as three libraries do, over gloo on the ranks of one job.

    contestant = MAKERS["torchft LocalSGD"](network, comm)
    contestant.sync()                            # every rank calls it; then the network holds the mean
    contestant.close()

Each library is called as its documentation says, less what is no part of a sync. No network is wrapped in DDP, no optimiser steps:
- torchft: `LocalSGD.sync`, with a real Manager in each rank and one lighthouse in rank 0; every rank is a replica group of its own.
- Accelerate: `LocalSGD.step` with a sync in each step, on an `Accelerator(cpu=True)` of the same process group.
- PyTorch: `PeriodicModelAverager.average_parameters` with period 1; it passes over weights without a gradient, so all have one.
"""

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from deepex.arena.arena import Arena
from deepex.comm.base import Communicator, Zeros, own_zeros
from one_sync import agreement_on, sync
from peers.workload import Unavailable

_INSTALL: Final = "pip install 'deepex[peers]'"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A network, and what brings it to its mean over all ranks."""

    network: nn.Module
    sync: Callable[[], object]
    close: Callable[[], object] = lambda: None


def make_deepex(network: nn.Module, comm: Communicator, zeros: Zeros) -> Contestant:
    """What a learner builds on a CPU for one replica per rank; `zeros` makes the ranks share their memory, or not."""
    arena = Arena(network, torch.device("cpu"), gathers=False, zeros=zeros)
    return Contestant(network=network, sync=partial(sync, agreement_on(arena.model), comm, 1 / comm.size))


def make_torchft(network: nn.Module, comm: Communicator) -> Contestant:
    """Its weights are equal on all ranks from the start, so `init_sync` is off; the optimiser is only asked for hooks."""
    os.environ.setdefault("RUST_LOG", "error")  # else each rank writes ten lines per sync
    logging.getLogger("torchft.manager").setLevel(logging.ERROR)  # it misses NCCL
    try:
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import LocalSGD
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo
    except ImportError as error:
        raise Unavailable(f"torchft: not installed ({error}); {_INSTALL} (it has wheels for x86-64 alone)") from error
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=comm.size) if comm.rank == 0 else None
    address = comm.gather(lighthouse and lighthouse.address())[0]
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(minutes=1)),
        load_state_dict=lambda _state: None,
        state_dict=dict,
        min_replica_size=comm.size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"rank_{comm.rank}",
        hostname="localhost",
        init_sync=False,
    )
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    local = LocalSGD(manager, network, optimiser, sync_every=1)
    return Contestant(network=network, sync=local.sync, close=partial(_close_torchft, comm, manager, lighthouse, store))


def _close_torchft(comm: Communicator, manager: Any, lighthouse: Any, _store: object) -> None:
    manager.shutdown()
    comm.barrier()  # the lighthouse last: a manager that cannot reach it complains
    if lighthouse is not None:
        lighthouse.shutdown()


def make_accelerate(network: nn.Module, comm: Communicator) -> Contestant:
    """It finds the ranks in the variables that torchrun sets, and the process group that is there already."""
    try:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD
    except ImportError as error:
        raise Unavailable(f"accelerate: not installed ({error}); {_INSTALL}") from error
    ranks = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.rank, "LOCAL_WORLD_SIZE": comm.size}
    threads = torch.get_num_threads()
    os.environ.update({name: str(value) for name, value in {**ranks, "OMP_NUM_THREADS": threads}.items()})
    local = LocalSGD(accelerator=Accelerator(cpu=True), model=network, local_sgd_steps=1)
    assert local.enabled, "Accelerate sees one process: it would sync nothing"
    return Contestant(network=network, sync=local.step)


def make_averager(network: nn.Module, _comm: Communicator) -> Contestant:
    """PyTorch's own."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a period of 1 is as dear as DDP
        averager = PeriodicModelAverager(period=1)
    return Contestant(network=network, sync=lambda: averager.average_parameters(network.parameters()))


def _make_shared(network: nn.Module, comm: Communicator) -> Contestant:
    return make_deepex(network, comm, comm.zeros)


def _make_alone(network: nn.Module, comm: Communicator) -> Contestant:
    return make_deepex(network, comm, own_zeros)


Maker = Callable[[nn.Module, Communicator], Contestant]
DEEPEX: Final = "DeepEx"
GLOO_ALONE: Final = "DeepEx, gloo alone"
MAKERS: Final[dict[str, Maker]] = {
    DEEPEX: _make_shared,
    GLOO_ALONE: _make_alone,
    "torchft LocalSGD": make_torchft,
    "Accelerate LocalSGD": make_accelerate,
    "PyTorch PeriodicModelAverager": make_averager,
}
