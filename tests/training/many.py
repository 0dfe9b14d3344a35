"""Train the same job in several ways, on 4, 2 and 1 ranks of one launch: `mpiexec -n 4 python -m tests.training.many DATA OUT`."""

import sys
import time
from pathlib import Path

from mpi4py import MPI

import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig

WAYS = {
    "period": (SyncConfig(period=2), True),
    "gradients": (SyncConfig(strategy="gradients"), True),
    "local": (SyncConfig(period=2, momentum="local"), True),
    "rounded": (SyncConfig(period=2), False),
}


def config(data: str, way: str) -> RunConfig:
    """8 replicas with batch norm and dropout, and a rate that is another in every step."""
    sync, deterministic = WAYS[way]
    return RunConfig(
        net="tests.networks:normed",
        data=data,
        epochs=2,
        batch=8,
        replicas=8,
        validate="none",
        optim=OptimConfig(schedule="cosine"),
        sync=sync,
        deterministic=deterministic,
        layout="contiguous",  # or each would choose by a trial, and dropout draws its masks in the order of the memory
    )


def main(data: str, out: Path) -> None:
    """On all 4 ranks; then on the first 2 and, beside them, on the third alone. Starting ranks takes most of the time."""
    world = MPI.COMM_WORLD
    assert world.size == 4
    part = world.Split((0, 0, 1, MPI.UNDEFINED)[world.rank])
    for comm in (world, part):
        for name in WAYS if comm != MPI.COMM_NULL else ():
            deepex.train(config(data, name), comm, out=out / str(comm.size) / name)
    done = world.Ibarrier()
    while not done.Test():  # asleep: a rank that waits in MPI takes a core from those that still train
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
