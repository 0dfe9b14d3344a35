"""Train the same job in several ways on the ranks of one launch: `mpiexec -n 4 python -m tests.engine.many DATA OUT`."""

import sys
from pathlib import Path

from mpi4py import MPI

import deepex
from deepex.engine.config import RunConfig
from deepex.engine.optim import OptimConfig
from deepex.sync import SyncConfig

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


if __name__ == "__main__":
    for name in WAYS:
        deepex.train(config(sys.argv[1], name), MPI.COMM_WORLD, out=Path(sys.argv[2]) / name)
