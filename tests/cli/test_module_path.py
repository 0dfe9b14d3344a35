"""What lies in the current directory is no module of the library, and a network there is found."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepex.data.dataset import PackedDataset
from deepex.record import RunDirectory, StudyDirectory
from tests.full import examples, in_full
from tests.mpi import HANGS, rank_environ

MakeData = Callable[[int], Path]
STRAYS = ("random", "json", "subprocess", "tempfile", "pickle", "socket", "signal", "secrets", "typer", "torch", "numpy", "mpi4py")
NETWORK = """
from torch import nn

def build(channels, size, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))
"""
SAFE = pytest.mark.parametrize("safe", examples([False], [False, True]), ids=["as usual", "PYTHONSAFEPATH"][: examples(1, 2)])


@pytest.fixture
def folder(tmp_path: Path, make_data: MakeData) -> Path:
    """A working directory as users have them: a network, and files whose names the library uses."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "mynet.py").write_text(NETWORK)
    for name in STRAYS:
        (here / f"{name}.py").write_text(
            f"open({str(here)!r} + '/imported', 'a').write('{name} ')\nraise SystemExit('stray {name}')"
        )
    settings = {"net": '"mynet:build"', "data": f'"{make_data(64)}"', "epochs": "1", "batch": "16", "threads": "1"}
    (here / "mine.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()) + 'validate = "none"\n')
    return here


def run(folder: Path, *command: str, safe: bool) -> None:
    environ = rank_environ(**({"PYTHONSAFEPATH": "1"} if safe else {}))
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=HANGS, check=False
    )
    imported = (folder / "imported").read_text() if (folder / "imported").exists() else ""
    assert (done.returncode, imported) == (0, ""), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "safe"), [("1", True), ("2", False), *examples([], [("1", False), ("2", True)])], ids=lambda value: f"{value}"
)
def test_a_network_of_the_current_directory_is_found_last(ranks: str, safe: bool, folder: Path) -> None:
    run(folder, "-m", "deepex", "train", "mine.toml", "--ranks", ranks, "--out", "run", "--quiet", safe=safe)
    assert RunDirectory.open(folder / "run").state["network"]["name"] == "mynet:build"


@in_full
@pytest.mark.slow
@SAFE
def test_the_runs_of_a_study_find_it_too(safe: bool, folder: Path) -> None:
    ranks = examples(1, 2)
    options = ("--ranks", str(ranks), "--names", "deepex,pytorch", "--repeats", "1", "--out", "study")
    run(folder, "-m", "deepex", "study", "frameworks", "mine.toml", *options, safe=safe)
    study = StudyDirectory.open(folder / "study")
    assert [(study.status(planned), planned.ranks) for planned in study.plan] == [("finished", ranks)] * 2


@pytest.mark.slow
@SAFE
def test_worker_processes_take_no_module_from_there(safe: bool, folder: Path) -> None:
    for number in range(8):
        path = folder / "images" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(path)
    run(folder, "-m", "deepex", "data", "pack", "images", "out", "--workers", "2", "--validation", "0.5", safe=safe)
    assert PackedDataset.open(folder / "out").part("train").count == 4
