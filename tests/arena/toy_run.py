"""Train with the toy optimiser, on all ranks and on the first alone: `mpiexec -n 2 python -m tests.arena.toy_run OUT`.

4 replicas, in one launch because starting ranks takes most of the time. `found.json` has what is not in a run directory.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from deepex.arena.optimiser import OPTIMISERS

OPTIMISERS.append("tests.arena.toy_optimiser")  # the one line that a new file costs, in the table of names

import pytest  # noqa: E402 - the keys of a configuration are made when it is loaded
from mpi4py import MPI  # noqa: E402

import deepex  # noqa: E402
from deepex.comm.solo import SoloCommunicator  # noqa: E402
from deepex.errors import DeepexError  # noqa: E402
from deepex.recipes import resumed_config  # noqa: E402
from deepex.recipes.network import build_network  # noqa: E402
from deepex.record.clock import NoClock  # noqa: E402
from deepex.training import session  # noqa: E402
from deepex.training.build import build  # noqa: E402
from deepex.training.config import RunConfig  # noqa: E402
from deepex.training.gather import make_job  # noqa: E402


def config(**keys: Any) -> RunConfig:
    usual = {"net": "tests.networks:normed", "samples": 192, "epochs": 2, "batch": 8, "replicas": 4, "deterministic": True}
    usual |= {"threads": 1, "sampling": 0, "device": "cpu", "validate": "none", "sync.period": 2}
    return deepex.recipe("fashion", usual | {"optim": "damped", "optim.rate": 0.002} | keys)


def train_until(out: Path, sync: int) -> None:
    """Stop in the middle of an epoch, at a sync."""
    run_stretch, done = session.run_stretch, [0]

    def counted(*where: Any, **keys: Any) -> int:
        done[0] += 1
        if done[0] == sync:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_stretch(*where, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "run_stretch", counted)
        deepex.train(config(), SoloCommunicator(), out=out)


def refused(run: Path | None = None, **keys: Any) -> str:
    """With what words it is."""
    try:
        if run is None:
            config(**keys)
        else:
            deepex.train(resumed_config(run, {"optim": keys}), SoloCommunicator(), out=run, resume=True)
    except DeepexError as error:
        return str(error)
    return "nothing was"


def memory() -> tuple[int, int]:
    """The bytes that a rank is expected to take, and what it takes: gradients stay where autograd makes them."""
    job = make_job(config(net="lenet-caffe", layout="contiguous"), SoloCommunicator(), build_network)
    parts = build(job, SoloCommunicator(), clock=NoClock())
    agreement, stored = parts.meeting.agreement, parts.states.stored()["squares"]
    taken = [parts.arena.memory, parts.arena.weights, agreement._last, agreement._total.buffer, *stored]
    parts.close()
    return job.placement.estimate["arena_bytes"], sum(tensor.nbytes for tensor in taken)


def alone(out: Path) -> None:
    """What one rank does."""
    deepex.train(config(), SoloCommunicator(), out=out / "one")
    train_until(out / "stopped", 4)
    found = {
        "memory": memory(),
        "refused": refused(**{"optim.memory": 2.0}),
        "unknown": refused(**{"optim.method": "damp"}),
    }
    for name in ("one again", "two again", "other", "one local", "two local"):
        shutil.copytree(out / "stopped", out / name)
    found["other"] = refused(out / "other", method="lars")
    resume(out / "one again", SoloCommunicator())
    resume(out / "one local", SoloCommunicator(), "local")
    (out / "found.json").write_text(json.dumps(found))


def resume(run: Path, comm: Any, momentum: str = "average") -> None:
    """Go on with a policy for the state that has none of its own."""
    sync = resumed_config(run, {}).sync
    deepex.train(resumed_config(run, {"sync": {"period": sync.period, "momentum": momentum}}), comm, out=run, resume=True)


if __name__ == "__main__":
    folder, world = Path(sys.argv[1]), MPI.COMM_WORLD
    if world.rank == 0:
        alone(folder)
    world.Barrier()
    deepex.train(config(), world, out=folder / "two")
    resume(folder / "two again", world)
    resume(folder / "two local", world, "local")
