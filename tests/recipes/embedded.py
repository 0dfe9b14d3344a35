"""A host program with ranks of its own: a job for four ranks of the pool."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI

import deepex
from deepex.comm.mpi import MpiCommunicator
from deepex.errors import ConfigError
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig


def simulate_and_learn(world: Any, data: str, out: str) -> None:
    """Ranks 1 and 3 learn, on a communicator of their own; the others simulate."""
    learns = world.rank % 2
    part = world.Split(learns)
    if learns:
        _learn(part, data, Path(out))
        assert world.recv(source=world.rank - 1, tag=7) == "simulating"
    else:
        world.send("simulating", dest=world.rank + 1, tag=7)
    assert part.allreduce(1) == part.size, "the caller's communicator still works"
    part.Free()
    done = world.Ibarrier()
    while not done.Test():  # asleep: a rank that waits in MPI takes a core from those that learn
        time.sleep(0.01)
    assert world.allreduce(1) == 4


def _learn(part: Any, data: str, out: Path) -> None:
    torch.set_num_threads(threads := 3)  # another number than the run takes
    config = RunConfig(net="tests.networks:normed", data=data, epochs=2, batch=8, validate="rank0", threads=1)
    run = deepex.train(config, part, out=out / "run")
    assert run.epochs()[-1].ranks == part.size
    with pytest.raises(ConfigError):
        deepex.train(deepex.recipe("fashion", {"replicas": 3}), comm=part, out=out / "never")
    assert torch.get_num_threads() == threads
    made: list[MpiCommunicator] = []
    split = MpiCommunicator.split
    groups = replace(config, sync=SyncConfig(strategy="hierarchical", group=2))
    with mock.patch.object(MpiCommunicator, "split", lambda *words: made.append(split(*words)) or made[-1]):
        deepex.train(groups, part, out=out / "groups")
    assert [each._comm for each in made] == [MPI.COMM_NULL], "freed: MPI has some 2,000, and a host may train that often"
