"""Every communicator passes the same contract, on real ranks."""

import json
import subprocess
import sys

import pytest

from tests.comm.contract import CHECKS
from tests.mpi import ROOT, rank_environ, run_ranks


def _verdict(result: subprocess.CompletedProcess[str], size: int, *kinds: str) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.strip().splitlines()[-len(kinds) :]]
    well = {check.__name__: "ok" for check in CHECKS}
    assert reports == [{"kind": kind, "size": size, "checks": well} for kind in kinds]


@pytest.mark.parametrize(("size", "kinds"), [(1, ("solo", "mpi", "gloo")), *((size, ("mpi", "gloo")) for size in (2, 3, 4))])
def test_contract(size: int, kinds: tuple[str, ...]) -> None:
    """One after another in the same processes: starting these takes most of the time."""
    _verdict(run_ranks(size, "-m", "tests.comm.contract", *kinds), size, *kinds)


def test_gloo_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.contract", "gloo"],
        cwd=ROOT, env=rank_environ(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    _verdict(result, 2, "gloo")
