"""What a GPU's paths carry: copies arrive, and every path has its tables. Run with `make test-gpu`."""

import json
from pathlib import Path

import pytest
import torch

from deepex.comm.solo import SoloCommunicator
from deepex.study.transfer.measure import measure
from deepex.study.transfer.probe_gpu import gpu_probes
from deepex.study.transfer.timing import Timing
from tests.mpi import run_ranks

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
COPIES = {
    "host-device pinned",
    "device-host pinned",
    "host-device pageable",
    "device-host pageable",
    "device-device, within 0",
}


@pytest.fixture(autouse=True)
def _gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a GPU"


def test_every_copy_arrives() -> None:
    """The tensor that an operation gives back is where it copied to: on the right side, pinned or not, with the source's bytes."""
    for probe in gpu_probes(CUDA):
        target = probe.make(SoloCommunicator(), 1 << 20)()
        probe.settle()
        assert isinstance(target, torch.Tensor)
        assert target.nbytes == 1 << 20
        assert target.is_cuda == ("device-host" not in probe.path), probe.path
        assert target.eq(1).all(), probe.path
        if not target.is_cuda:
            assert target.is_pinned() == ("pinned" in probe.path), probe.path


def test_every_path_of_one_rank() -> None:
    tables = measure(SoloCommunicator(), sizes=[8, 1 << 20], timing=Timing(seconds=0.01, repeats=3), device=CUDA)
    paths = {table["path"] for table in tables}
    assert paths - {"memory"} >= COPIES
    assert all(min(table["seconds"]) > 0 for table in tables if "bytes" in table)
    assert len(tables) == 3 * len(paths)
    json.dumps(tables, allow_nan=False)


def test_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """MPI moves memory of the host and of the device."""
    out = tmp_path / "measurements.json"
    quick = ("--seconds", "0.01", "--repeats", "3", "--sizes", "8,1048576")
    done = run_ranks(2, "-m", "deepex.study.transfer", "--out", str(out), "--comm", "mpi", *quick)
    assert done.returncode == 0, done.stderr[-3000:]
    paths = {table["path"] for table in json.loads(out.read_text())}
    assert paths >= {
        "rank-rank mpi, 0 and 1",
        "rank-rank mpi, 0 and 1, device memory",
        "all-reduce mpi, 2 ranks",
        "all-reduce mpi, 2 ranks, device memory",
        "host-device pinned, 2 ranks at once",
    }
