"""One sync on two real ranks by those that need no other library, and what is said where one is missing."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sync_peers
from deepex.comm.solo import SoloCommunicator
from peers.local_sgd import MAKERS
from peers.workload import Unavailable
from tests.full import in_full
from tests.mpi import ROOT, run_ranks

AVERAGER = "PyTorch PeriodicModelAverager"
WIDTH = 500_000  # 2 MB of weights: a copy of them shows


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH // 4, 4, bias=False), nn.BatchNorm1d(4))


@pytest.mark.parametrize(("name", "module"), [("torchft LocalSGD", "torchft"), ("Accelerate LocalSGD", "accelerate")])
def test_what_is_missing_says_so(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in [module, *(loaded for loaded in sys.modules if loaded.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, found, None)
    with pytest.raises(Unavailable, match=rf"{module}: not installed .*; pip install 'deepex\[peers\]'"):
        MAKERS[name](build(), SoloCommunicator())


@in_full
@pytest.mark.slow
def test_a_sync_on_two_ranks(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = run_ranks(2, __file__, str(tmp_path / "found.json"), PYTHONPATH=path, **sync_peers.GIVES_BACK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert AVERAGER in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    facts = found["facts"]
    assert {name: facts[name]["averages_batch_norm"] for name in facts} == {
        "DeepEx": True,
        "DeepEx, gloo alone": True,
        AVERAGER: False,
    }
    assert {name: facts[name]["collectives"] for name in facts} == {"DeepEx": 2, "DeepEx, gloo alone": 1, AVERAGER: 1}
    assert facts["DeepEx"]["all_reduced_bytes"] == 8, "two signals"
    assert facts[AVERAGER]["all_reduced_bytes"] == 4 * (WIDTH + 8)
    assert min(facts[AVERAGER]["extra_bytes"]) > WIDTH * 4 * 0.9, "it makes a copy of all weights"
    assert found["parameters"] == WIDTH + 8
    assert all(len(seconds) == 2 for seconds in found["seconds"].values())


def _rank(answer: str) -> None:
    from deepex.comm.distributed import DistributedCommunicator
    from deepex.comm.mpi import MpiCommunicator

    comm = DistributedCommunicator("gloo", bootstrap=MpiCommunicator())
    makers = {name: make for name, make in MAKERS.items() if not name.endswith("LocalSGD")}
    found = sync_peers.measure(makers, build, comm, 2)
    if comm.rank == 0:
        sync_peers.show([found])
        Path(answer).write_text(json.dumps(found), encoding="utf-8")
    comm.close()


if __name__ == "__main__":
    _rank(sys.argv[1])
