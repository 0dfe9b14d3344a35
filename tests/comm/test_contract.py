"""Every communicator passes the same contract, on real ranks."""

import json
import subprocess
import sys

import pytest

from tests.comm.contract import CHECKS
from tests.mpi import ROOT, rank_environ, run_ranks


def _verdict(result: subprocess.CompletedProcess[str], size: int) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["size"] == size
    assert report["checks"] == {check.__name__: "ok" for check in CHECKS}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_contract(kind: str, size: int) -> None:
    _verdict(run_ranks(size, "-m", "tests.comm.contract", kind), size)


def test_contract_of_solo() -> None:
    _verdict(run_ranks(1, "-m", "tests.comm.contract", "solo"), 1)


def test_gloo_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.contract", "gloo"],
        cwd=ROOT, env=rank_environ(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    _verdict(result, 2)
