import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from deepex.comm import Communicator, Place, as_communicator, choose, connect
from deepex.comm.selection import KINDS
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError, UnknownName
from tests.mpi import rank_environ, run_ranks

ONE = Place()
FOUR = Place(rank=1, size=4, local_rank=1, local_size=4, launcher="mpich")  # on one node
EIGHT = Place(rank=5, size=8, local_rank=1, local_size=4, node=1, num_nodes=2, launcher="slurm")
TORCHRUN = Place(rank=1, size=4, local_rank=1, local_size=4, launcher="torchrun")
ENVIRONMENT = Place(rank=1, size=4, local_rank=1, local_size=4, launcher="environment")


@pytest.mark.parametrize(
    ("place", "options", "kind", "reason"),
    [
        (ONE, {"device": "cpu"}, "solo", "one rank: nothing to communicate"),
        (ONE, {"device": "cuda"}, "solo", "one rank"),
        (FOUR, {"device": "cpu"}, "mpi", "4 ranks on CPUs: the machine's MPI"),
        (EIGHT, {"device": "cpu"}, "mpi", "8 ranks on CPUs"),
        (TORCHRUN, {"device": "cpu"}, "gloo", "started by torchrun, without a GPU per rank"),
        (ENVIRONMENT, {"device": "cpu"}, "gloo", "started by RANK and WORLD_SIZE, without a GPU per rank"),
        (FOUR, {"device": "cuda"}, "nccl", "one GPU per rank"),
        (EIGHT, {"device": "cuda", "own_device": True}, "nccl", "one GPU per rank"),
        (TORCHRUN, {"device": "cuda"}, "nccl", "one GPU per rank"),
        (FOUR, {"device": "cuda", "own_device": False, "num_devices": 3}, "mpi", "4 ranks share 3 GPU(s), which NCCL refuses: MPI"),
        (FOUR, {"device": "cuda", "own_device": False}, "mpi", "staged through pinned host memory"),
        (FOUR, {"device": "cuda", "own_device": False, "mpi_cuda_aware": True}, "mpi", "by device pointer"),
        (FOUR, {"device": "cuda", "own_device": False, "mpi_cuda_aware": False}, "mpi", "staged through pinned host memory"),
        (TORCHRUN, {"device": "cuda", "own_device": False}, "gloo", "started by torchrun, without a GPU per rank"),
    ],
)
def test_auto_says_what_and_why(place: Place, options: dict[str, Any], kind: str, reason: str) -> None:
    choice = choose("auto", place=place, **options)
    assert choice.kind == kind
    assert reason in choice.reason


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
@pytest.mark.parametrize("place", [ONE, FOUR, TORCHRUN], ids=["one", "four", "torchrun"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_is_taken(kind: str, place: Place, device: str) -> None:
    choice = choose(kind, place=place, device=device)
    assert (choice.kind, choice.reason) == (kind, "asked for")


def test_solo_and_nccl_can_be_asked_for_where_they_work() -> None:
    assert choose("solo", place=ONE, device="cuda").kind == "solo"
    assert choose("nccl", place=FOUR, device="cuda").kind == "nccl"


def test_solo_is_refused_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="comm is solo, but the launcher started 4 ranks: use auto, mpi, gloo or nccl"):
        choose("solo", place=FOUR, device="cpu")


def test_nccl_is_refused_without_gpus() -> None:
    with pytest.raises(ConfigError, match="comm is nccl, but the device is cpu: NCCL needs GPUs; use mpi or gloo"):
        choose("nccl", place=FOUR, device="cpu")


def test_an_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(UnknownName, match="unknown communicator 'ncl'; did you mean nccl") as caught:
        choose("ncl", place=ONE, device="cpu")
    assert all(kind in str(caught.value) for kind in KINDS)


# connect


def test_a_process_that_nobody_launched_gets_a_communicator_of_one() -> None:
    comm = connect(environ={})
    assert isinstance(comm, SoloCommunicator)
    assert (comm.rank, comm.size, comm.reason) == (0, 1, "one rank: nothing to communicate")


def test_connect_refuses_what_choose_refuses() -> None:
    with pytest.raises(ConfigError, match="nccl"):
        connect("nccl", device="cpu", environ={})


@pytest.mark.slow
def test_every_rank_starts_mpi_with_one_thread_level_whatever_its_node_and_configuration() -> None:
    """Ranks of MPICH that differ in it give wrong sums, without an error."""
    program = """
import deepex.machine.hardware as hardware
from deepex.comm.place import find_place
import os
rank = find_place(os.environ).rank
hardware.describe_cpu = lambda: {"num_cores_logical": 1 + 63 * rank, "num_cores_limit": None, "num_cores_usable": 1}
from deepex.comm import connect
comm = connect("mpi")
from mpi4py import MPI
print(MPI.Query_thread() == MPI.THREAD_MULTIPLE)
"""
    done = run_ranks(2, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 2


def test_what_mpi_refuses_is_an_exception_and_ends_no_job() -> None:
    """As where mpi4py starts MPI itself: of the world, of one rank alone, and of a communicator that is made of it."""
    program = """
from deepex.comm.library import start_mpi
mpi = start_mpi()
for comm in (mpi.COMM_WORLD, mpi.COMM_SELF, mpi.COMM_WORLD.Dup()):
    try:
        comm.send(b"", dest=comm.size)
    except mpi.Exception as error:
        print("told" if error.Get_error_class() == mpi.ERR_RANK else error)
"""
    done = run_ranks(1, "-c", program)
    assert (done.returncode, done.stdout.split()) == (0, ["told"] * 3), done.stderr


@pytest.mark.slow
def test_an_mpi_that_was_started_without_threads_is_refused() -> None:
    program = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_SINGLE)
from deepex.comm import as_communicator
as_communicator(MPI.COMM_WORLD)
"""
    done = run_ranks(1, "-c", program)
    assert done.returncode == 1
    assert "CommError: MPI runs with thread level SINGLE, but torch has threads" in done.stderr


# In a process of its own, because MPI starts once in each and stays.
WITH_MPI = """
import json, sys
import torch
from deepex.comm import as_communicator, connect
from deepex.errors import DeepexError

found = {}

def message(call):
    try:
        call()
    except DeepexError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"not ours, {type(error).__name__}: {error}"

connect().close()
found["loaded by one rank"] = "mpi4py.MPI" in sys.modules
found["other launcher"] = message(lambda: connect(environ={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}))
from mpi4py import MPI
handed = MPI.COMM_WORLD.Split(0, 0)
comm, tensor = as_communicator(handed), torch.arange(3.0)
comm.sum(tensor)
found["wrapped"] = [comm.kind, comm.rank, comm.size, tensor.tolist()]
comm.close()
found["usable after close"] = handed.allreduce(5)
found["null"] = message(lambda: as_communicator(MPI.COMM_NULL))
found["class"] = message(lambda: as_communicator(MPI.Intracomm))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def with_mpi() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", WITH_MPI], capture_output=True, text=True, check=False, env=rank_environ())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_connect_for_one_rank_starts_no_mpi(with_mpi: dict[str, Any]) -> None:
    assert not with_mpi["loaded by one rank"]


def test_a_launcher_of_another_mpi_is_noticed(with_mpi: dict[str, Any]) -> None:
    """A site's mpiexec with our MPI: each process thinks that it is alone."""
    text = with_mpi["other launcher"]
    assert text.startswith("CommError: the launcher (openmpi) started 4 ranks, but the MPI library sees 1")
    assert "MPI4PY_LIBMPI" in text


# What a caller hands over


class Fake:
    """Looks a little like a communicator of mpi4py."""

    def Dup(self) -> None:  # noqa: N802 - MPI's name
        raise AssertionError("not a communicator")


def test_one_of_ours_is_taken_as_it_is() -> None:
    comm: Communicator = SoloCommunicator()
    assert as_communicator(comm) is comm


def test_an_mpi4py_communicator_is_wrapped_and_left_to_its_owner(with_mpi: dict[str, Any]) -> None:
    assert with_mpi["wrapped"] == ["mpi", 0, 1, [0.0, 1.0, 2.0]]
    assert with_mpi["usable after close"] == 5


@pytest.mark.parametrize("what", ["null", "class"])
def test_a_communicator_of_mpi4py_that_has_no_ranks_is_a_mistake_of_the_callers(with_mpi: dict[str, Any], what: str) -> None:
    """MPI.COMM_NULL is what a rank outside of a split holds; MPI.Intracomm is the class, not a communicator."""
    assert with_mpi[what] is not None
    assert with_mpi[what].startswith("ConfigError: ")


@pytest.mark.parametrize("value", [None, 4, "mpi", torch.zeros(1), Fake(), Fake, object()], ids=lambda value: type(value).__name__)
def test_anything_else_is_shown_with_what_it_must_be(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        as_communicator(value)
    assert f"({type(value).__name__})" in str(caught.value)
    assert "mpi4py communicator, for example MPI.COMM_WORLD" in str(caught.value)
    assert "deepex.comm.Communicator" in str(caught.value)


def test_the_environment_is_not_changed_by_looking() -> None:
    before = dict(os.environ)
    connect(environ={})
    assert dict(os.environ) == before
