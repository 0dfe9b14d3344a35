"""Every communicator passes the same contract, on real ranks."""

import json
import subprocess
import sys

import pytest

from tests.comm.contract import CHECKS
from tests.mpi import HANGS, ROOT, rank_environ, run_ranks


def _verdict(result: subprocess.CompletedProcess[str], size: int, *words: str) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.strip().splitlines() if not line.startswith("[Gloo]")]  # as that of torch 2.10
    reports = [json.loads(line) for line in lines[-len(words) :]]
    well = {check.__name__: "ok" for check in CHECKS}
    parts = [word.partition(":") for word in words]
    assert reports == [{"kind": kind, "size": int(first or size), "checks": well} for kind, _, first in parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "thread_level", "words"),
    [
        (1, "FUNNELED", ("solo", "mpi", "gloo", "wrapped-solo")),
        (4, "FUNNELED", ("mpi", "gloo", "mpi:3", "gloo:3", "mpi:2", "gloo:2", "wrapped-gloo:2")),
        (4, "MULTIPLE", ("mpi", "mpi:3", "mpi:2", "wrapped-mpi")),
    ],
)
def test_contract(size: int, thread_level: str, words: tuple[str, ...]) -> None:
    """One after another in the same processes, of all ranks and of some: starting these takes most of the time."""
    _verdict(run_ranks(size, "-m", "tests.comm.contract", thread_level, *words), size, *words)


@pytest.mark.slow
def test_gloo_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.contract", "FUNNELED", "gloo"],
        cwd=ROOT, env=rank_environ(), capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    _verdict(result, 2, "gloo")
