"""A strategy and a period rule that are one file each, and a line in a table: DeepEx trains, records and checks with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepex.record import RunDirectory
from tests.mpi import run_ranks

LAZY = ("sync.strategy=lazy", "sync.laziness=1")
JOBS = {
    "eager": ("sync.strategy=lazy", "sync.laziness=0", "sync.period=growing", "sync.first=2"),
    "usual": ("sync.period=growing", "sync.first=2"),
    "lazy": LAZY,
    "longer": (*LAZY, "epochs=2"),
    "lazier": ("sync.laziness=2",),
    "misspelt": ("sync.strategy=lazi",),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of all runs, and what became of each, on two ranks."""
    folder = tmp_path_factory.mktemp("toys")
    words = [word for name, keys in JOBS.items() for word in ("--", str(folder / name), *keys)]
    done = run_ranks(2, "-m", "tests.sync.toy_run", *words[1:])
    assert done.returncode == 0, done.stderr
    return folder, dict(zip(JOBS, done.stdout.splitlines(), strict=True))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_strategy_and_a_rule_are_one_file_each(said: tuple[Path, dict[str, str]]) -> None:
    folder, lines = said
    assert {lines[name] for name in ("eager", "usual", "lazy", "longer")} == {"trained"}
    eager, lazy, longer = (RunDirectory.open(folder / name) for name in ("eager", "lazy", "longer"))
    fast, usual, slow = (load_file(folder / name / "weights.safetensors") for name in ("eager", "usual", "lazy"))
    assert all(torch.equal(fast[name], usual[name]) for name in usual), "without laziness it is the plain mean"
    assert not all(torch.equal(fast[name], slow[name]) for name in slow)
    assert [(epoch.syncs, epoch.period) for epoch in eager.epochs()] == [(3, "growing: 2, then 2 times as long each")], (
        "2 + 4 + 2 steps"
    )
    assert [epoch.syncs for epoch in lazy.epochs()] == [4], "the strategy's usual period"
    assert (lazy.config["sync"]["laziness"], lazy.state["sync"]["strategy"]) == (1.0, "lazy")
    losses = [epoch.validation.loss for epoch in longer.epochs()]
    assert losses[0] == losses[1], "who is as lazy as that learns nothing"


@pytest.mark.ranks
@pytest.mark.slow
def test_their_options_are_checked(said: tuple[Path, dict[str, str]]) -> None:
    assert "sync.laziness is 2.0; it must be from 0 to 1" in said[1]["lazier"]
    assert "streaming, auto, lazy" in said[1]["misspelt"]
