"""A rank that fails while a sum is under way in the background, and what a job needs to have one."""

import subprocess
import sys
import textwrap

import pytest

from tests.full import examples
from tests.mpi import HANGS, rank_environ, run_ranks

FAILING = """
import sys, threading
import torch
from deepex.comm import Background, connect
from deepex.comm.together import abort_on_failure

comm = connect(sys.argv[1])
background = Background(comm)
say = lambda text: print(text, file=sys.stderr, flush=True)
with abort_on_failure(comm, say, lambda text: None):
    try:
        {body}
    finally:
        background.close()
print("came to its end")
"""


def _fail(kind: str, body: str) -> subprocess.CompletedProcess[str]:
    script = FAILING.replace("{body}", textwrap.indent(textwrap.dedent(body), " " * 8).strip())
    result = run_ranks(2, "-c", script, kind)
    assert result.returncode != 0
    assert "came to its end" not in result.stdout
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", examples(["mpi"], ["mpi", "gloo"]))
def test_a_failure_in_one_ranks_thread_ends_the_job(kind: str) -> None:
    """The other rank waits for a sum that never comes."""
    body = """
    background.run(lambda own: 1 // 0 if comm.rank == 1 else own.sum(torch.ones(1000))).wait()
    """
    assert "rank 1 on" in _fail(kind, body).stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", examples(["gloo"], ["mpi", "gloo"]))
def test_a_rank_that_fails_with_a_sum_under_way_ends_the_job(kind: str) -> None:
    """Its own sum is one that nobody joins, and closing does not wait for it."""
    body = """
    begun = threading.Event()
    if comm.rank == 1:
        background.run(lambda own: begun.set() or own.sum(torch.ones(1000)))
        begun.wait()
        raise RuntimeError("lost")
    comm.barrier()
    """
    assert "failed: RuntimeError: lost" in _fail(kind, body).stderr


HANDED_OVER = """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
from deepex.comm import Background, as_communicator
from deepex.errors import CommError

comm = as_communicator(MPI.COMM_WORLD)
try:
    Background(comm).close()
    print("well")
except CommError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("serialized", "initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE)"),
        *examples([], [("multiple", "well")]),
    ],  # the pool's
)
def test_the_thread_level_of_a_communicator_that_is_handed_over_counts(level: str, said: str) -> None:
    result = run_ranks(2, "-c", HANDED_OVER, level)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(said) == 2, result.stdout


def test_one_rank_needs_no_thread_and_no_thread_level() -> None:
    script = """
import threading
import torch
from deepex.comm import Background, connect
background, tensor = Background(connect("mpi")), torch.ones(3)
background.sum(tensor, 0.5).wait()
background.close()
print(tensor.tolist(), threading.active_count())
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=rank_environ(), capture_output=True, text=True, timeout=HANGS, check=False)
    assert result.stdout.split(maxsplit=3) == ["[0.5,", "0.5,", "0.5]", "1\n"], result.stderr[-3000:]
