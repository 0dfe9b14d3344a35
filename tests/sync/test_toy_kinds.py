"""A strategy and a period rule that are one file each, and a line in a table: DeepEx trains, records and checks with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepex.record import RunDirectory
from tests.mpi import own_lines, run_ranks


def trained(out: Path, *keys: str) -> tuple[RunDirectory, dict[str, torch.Tensor]]:
    done = run_ranks(2, "-m", "tests.sync.toy_run", str(out), *keys)
    assert done.returncode == 0, done.stderr
    return RunDirectory.open(out), load_file(out / "weights.safetensors")


@pytest.mark.slow
def test_a_strategy_and_a_rule_are_one_file_each(tmp_path: Path) -> None:
    eager, fast = trained(tmp_path / "eager", "sync.strategy=lazy", "sync.laziness=0", "sync.period=growing", "sync.first=2")
    _, usual = trained(tmp_path / "usual", "sync.period=growing", "sync.first=2")
    lazy, slow = trained(tmp_path / "lazy", "sync.strategy=lazy", "sync.laziness=1")
    assert all(torch.equal(fast[name], usual[name]) for name in usual), "without laziness it is the plain mean"
    initial = load_file(tmp_path / "eager" / "weights.safetensors")
    assert not all(torch.equal(initial[name], slow[name]) for name in slow)
    assert [(epoch.syncs, epoch.period) for epoch in eager.epochs()] == [(3, "growing: 2, then 2 times as long each")], (
        "2 + 4 + 2 steps"
    )
    assert [epoch.syncs for epoch in lazy.epochs()] == [4], "the strategy's usual period"
    assert (lazy.config["sync"]["laziness"], lazy.state["sync"]["strategy"]) == (1.0, "lazy")
    longer, _ = trained(tmp_path / "longer", "sync.strategy=lazy", "sync.laziness=1", "epochs=2")
    losses = [epoch.validation.loss for epoch in longer.epochs()]
    assert losses[0] == losses[1], "who is as lazy as that learns nothing"


def test_their_options_are_checked(tmp_path: Path) -> None:
    done = run_ranks(1, "-m", "tests.sync.toy_run", str(tmp_path / "run"), "sync.laziness=2")
    assert "sync.laziness is 2.0; it must be from 0 to 1" in done.stderr
    done = run_ranks(1, "-m", "tests.sync.toy_run", str(tmp_path / "run"), "sync.strategy=lazi")
    assert "streaming, auto, lazy" in done.stderr, own_lines(done.stderr)
