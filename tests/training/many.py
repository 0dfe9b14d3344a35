"""Train the same job in several ways: a job for the ranks of the pool."""

from pathlib import Path
from typing import Any

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


def train_all(comm: Any, data: str, out: str) -> None:
    """Train every way, each in a run directory below `out` that is named for it."""
    for name in WAYS:
        deepex.train(config(data, name), comm, out=Path(out) / name)
