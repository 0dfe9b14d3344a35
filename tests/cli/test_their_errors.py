"""An error in a user's own code, in the middle of a run, is told with its place there and is not ours to be reported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from deepex.errors import place_in_their_code
from deepex.record import RunDirectory
from tests.full import examples
from tests.mpi import run_deepex

NETWORK = """
from torch import nn

class Late(nn.Sequential):
    calls = 0
    def forward(self, images):
        self.calls += self.training
        if self.calls > 60:
            raise ValueError("the sixty-first [call]\\nis one too many")
        return super().forward(images)

def build(channels, size, classes):
    return Late(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))
"""
ERROR = "ValueError: the sixty-first [call] is one too many ({file}, line 9, in forward)"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "said"), [*examples([], [(1, "deepex: " + ERROR)]), (2, "failed: " + ERROR)])
def test_a_network_that_fails_late_is_told_with_its_place(
    ranks: int, said: str, make_data: Callable[[int], Path], tmp_path: Path
) -> None:
    file = tmp_path / "mynet.py"
    file.write_text(NETWORK)
    keys = {"net": "mynet:build", "data": make_data(256), "epochs": 20, "batch": 16, "threads": 1, "validate": "none"}
    settings = [f"--set={key}={value}" for key, value in keys.items()]
    done = run_deepex("train", "fashion", "--ranks", str(ranks), "--out", "run", *settings, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert said.format(file=file) in done.stderr
    assert "report it" not in done.stderr
    assert "Traceback" not in done.stderr
    state = RunDirectory.open(tmp_path / "run").state
    assert (state["status"], ERROR.format(file=file) in state["reason"]) == ("failed", True)


@pytest.mark.slow
def test_a_network_that_exits_has_not_finished_the_run(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    file = tmp_path / "mynet.py"
    file.write_text(NETWORK.replace('raise ValueError("the sixty-first [call]\\nis one too many")', "raise SystemExit(0)"))
    keys = {"net": "mynet:build", "data": make_data(256), "epochs": 20, "batch": 16, "threads": 1, "validate": "none"}
    done = run_deepex("train", "fashion", "--out", "run", *[f"--set={key}={value}" for key, value in keys.items()], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"deepex: SystemExit: 0 ({file}, line 9, in forward)" in done.stderr
    assert RunDirectory.open(tmp_path / "run").state["status"] == "failed"


def test_the_place_is_the_last_in_ones_own_code() -> None:
    layer, images = nn.Linear(3, 4), torch.zeros(2, 5)
    with pytest.raises(RuntimeError) as raised:
        layer(images)  # which fails in PyTorch's own files
    assert place_in_their_code(raised.value).startswith(f"{__file__}, line ")
