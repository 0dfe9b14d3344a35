"""Ranks that share a GPU: what they take for their communicator, and that they run one kind of step."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi import run_deepex, run_ranks

pytestmark = pytest.mark.gpu

MakeData = Callable[[int], Path]
SHARED = """
from deepex.comm import connect
from deepex.comm.selection import device_name
comm = connect("auto", device="cuda")
if comm.rank == 0:
    print(comm.kind, comm.reason, len(set(comm.gather(device_name()))), sep="|")
else:
    comm.gather(device_name())
"""


def test_ranks_that_share_a_gpu_know_it_by_its_name() -> None:
    done = run_ranks(2, "-c", SHARED)
    assert done.returncode == 0, done.stderr
    kind, reason, devices = done.stdout.strip().split("|")
    assert (kind, devices) == ("mpi", "1")
    assert reason.startswith("2 ranks share 1 GPU(s), which NCCL refuses: MPI")


UNEVEN = """
import json, sys
from mpi4py import MPI
import deepex
import deepex.step.choose as choose
if MPI.COMM_WORLD.rank == 1:
    def refuse(parts, clock):
        raise RuntimeError("made up")
    choose._captured = refuse
keys = {"data": sys.argv[1], "net": "lenet", "batch": 8, "epochs": 1, "step": "fastest"}
run = deepex.train(deepex.recipe("fashion", keys), MPI.COMM_WORLD, out=sys.argv[2])
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps([run.state["step"], run.epochs()[0].train.loss]))
"""


def test_a_capture_that_fails_on_one_rank_makes_all_run_steps_one_by_one(make_data: MakeData, tmp_path: Path) -> None:
    done = run_ranks(2, "-c", UNEVEN, str(make_data(64)), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    step, loss = json.loads(done.stdout.splitlines()[-1])
    assert (step["kind"], [one["kind"] for one in step["by_rank"]]) == ("eager", ["captured", "eager"])
    assert "capturing it failed (RuntimeError: made up)" in step["reason"]
    assert 0 < loss < 10


WRONG_ON_THE_DEVICE = """
import sys
from mpi4py import MPI
import deepex
from deepex.comm import mpi
right = mpi.MpiCommunicator.sum
def wrong(self, tensor, weight=1.0):
    right(self, tensor, weight)
    if tensor.is_cuda:
        tensor[-1] += 1
mpi.MpiCommunicator.sum = wrong
keys = {"data": sys.argv[1], "net": "lenet", "batch": 8, "epochs": 1}
deepex.train(deepex.recipe("fashion", keys), MPI.COMM_WORLD, out=sys.argv[2])
"""


def test_sums_that_are_wrong_on_the_device_alone_are_an_error(make_data: MakeData, tmp_path: Path) -> None:
    done = run_ranks(2, "-c", WRONG_ON_THE_DEVICE, str(make_data(64)), str(tmp_path / "run"))
    assert done.returncode != 0
    assert "known numbers over 2 ranks came out wrong in 1 of them" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_says_why_it_has_its_communicator(tmp_path: Path) -> None:
    settings = ("--set", "samples=256", "--set", "epochs=1", "--set", "batch=16", "--quiet")
    done = run_deepex("train", "fashion", "--ranks", "2", *settings, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert state["comm"]["reason"].startswith("2 ranks share 1 GPU(s)")
