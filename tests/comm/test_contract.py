"""Every communicator passes the same contract, on real ranks."""

import json
import subprocess
import sys

import pytest

from tests.comm.contract import CHECKS, check_on_ranks
from tests.full import FULL, examples, in_full
from tests.mpi import HANGS, ROOT, rank_environ, run_ranks
from tests.pool import RankPool

pytestmark = pytest.mark.ranks
WELL = {check.__name__: "ok" for check in CHECKS}


def _verdict(result: subprocess.CompletedProcess[str], size: int, *words: str) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.strip().splitlines() if not line.startswith("[Gloo]")]  # as that of torch 2.10
    reports = [json.loads(line) for line in lines[-len(words) :]]
    assert reports == [{"kind": word, "size": size, "checks": WELL} for word in words]


@pytest.mark.parametrize("size", examples([1, 3], [1, 2, 3, 4]))
@pytest.mark.parametrize("name", ["mpi", "gloo"])
def test_contract(name: str, size: int, ranks: RankPool) -> None:
    """Of all ranks and of some, on a communicator that is handed over; MPI has THREAD_MULTIPLE, as where we start it."""
    assert ranks.run(check_on_ranks, name, size=size) == [WELL] * size


@pytest.mark.parametrize(("name", "size"), [("solo", 1), ("wrapped-solo", 1), ("wrapped-gloo", 2), ("wrapped-mpi", 4)])
def test_contract_of_the_others(name: str, size: int, ranks: RankPool) -> None:
    assert ranks.run(check_on_ranks, name, size=size) == [WELL] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", examples([2], [2, 3, 4]))
def test_contract_with_a_lower_thread_level(size: int) -> None:
    """In processes of their own, since MPI starts once in each; this is also how `connect` finds the others."""
    words = ("mpi", "gloo") if FULL else ("mpi",)
    _verdict(run_ranks(size, "-m", "tests.comm.contract", "FUNNELED", *words), size, *words)


@in_full
@pytest.mark.slow
def test_gloo_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.contract", "FUNNELED", "gloo"],
        cwd=ROOT, env=rank_environ(), capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    _verdict(result, 2, "gloo")
