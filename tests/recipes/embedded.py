"""A host program with ranks of its own: `mpiexec -n 4 python -m tests.recipes.embedded DATA OUT`."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from mpi4py import MPI

if __name__ == "__main__":
    world = MPI.COMM_WORLD
    learns = world.rank % 2
    part = world.Split(learns)
    if learns:  # a rank that simulates need not load what the others learn with
        import torch

        import deepex
        from deepex.comm.mpi import MpiCommunicator
        from deepex.errors import ConfigError
        from deepex.sync.config import SyncConfig
        from deepex.training.config import RunConfig

        torch.set_num_threads(threads := 3)  # another number than the run takes
        config = RunConfig(net="tests.networks:normed", data=sys.argv[1], epochs=2, batch=8, validate="rank0", threads=1)
        run = deepex.train(config, part, out=Path(sys.argv[2]) / "run")
        assert run.epochs()[-1].ranks == part.size
        try:
            deepex.train(deepex.recipe("fashion", {"replicas": 3}), comm=part, out=Path(sys.argv[2]) / "never")
        except ConfigError:
            pass
        else:
            raise AssertionError("3 replicas on 2 ranks were taken")
        assert torch.get_num_threads() == threads
        made: list[MpiCommunicator] = []
        split = MpiCommunicator.split
        groups = replace(config, sync=SyncConfig(strategy="hierarchical", group=2))
        with mock.patch.object(MpiCommunicator, "split", lambda *words: made.append(split(*words)) or made[-1]):
            deepex.train(groups, part, out=Path(sys.argv[2]) / "groups")
        assert [each._comm for each in made] == [MPI.COMM_NULL], "freed: MPI has some 2,000, and a host may train that often"
    else:
        world.send("simulating", dest=world.rank + 1, tag=7)
    if learns:
        assert world.recv(source=world.rank - 1, tag=7) == "simulating"
    assert part.allreduce(1) == part.size, "the caller's communicator still works"
    done = world.Ibarrier()
    while not done.Test():  # asleep: a rank that waits in MPI takes a core from those that learn
        time.sleep(0.01)
    assert world.allreduce(1) == 4
    if world.rank == 0:
        print("all well")
