"""An optimiser that is one file, and a line in a table: DeepEx trains, syncs, keeps and checks with it, and knows its memory."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deepex.record import RunDirectory
from deepex.training import checkpoint as checkpoints
from tests.mpi import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    done = run_ranks(2, "-m", "tests.arena.toy_run", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def weights(run: Path) -> bytes:
    return (run / "weights.safetensors").read_bytes()


def test_replicas_on_any_ranks_have_the_same_bits(runs: Path) -> None:
    assert weights(runs / "one") == weights(runs / "two")
    one, two = (RunDirectory.open(runs / name) for name in ("one", "two"))
    assert (one.state["ranks"], two.state["ranks"], one.state["replicas"]) == (1, 2, 4)
    assert one.epochs()[1].train.loss < one.epochs()[0].train.loss, "it learns"
    assert one.config["optim"]["memory"] == 0.99, "its key is in the record"


def test_each_state_has_its_policy(runs: Path) -> None:
    """Squares are each replica's own, and in a file for each; what has no policy of its own is averaged, as the run has it."""
    checkpoint = checkpoints.newest(runs / "one" / "checkpoints")
    assert (checkpoint.header["layout"]["states"], checkpoint.header["local"]) == (["mean", "squares"], ["squares"])
    names = {path.name.removeprefix(checkpoint.path.stem) for path in checkpoint.path.parent.glob(f"{checkpoint.path.stem}-*")}
    assert names == {f"-squares{replica:06d}.safetensors" for replica in range(4)}
    squares = [load_file(path)["squares"] for path in sorted(checkpoint.path.parent.glob(f"{checkpoint.path.stem}-*"))]
    assert len({float(one.sum()) for one in squares}) == 4
    assert all(bool((one > 0).any()) and bool((one >= 0).all()) for one in squares)


def test_a_run_that_was_stopped_in_an_epoch_goes_on_as_if_it_had_not_been(runs: Path) -> None:
    stopped = RunDirectory.open(runs / "stopped")
    assert (stopped.state["status"], checkpoints.newest(stopped.checkpoints).position.step) == ("stopped", 2)
    assert weights(runs / "one again") == weights(runs / "two again") == weights(runs / "one")


def test_another_policy_from_a_checkpoint_on(runs: Path) -> None:
    """Both states are local then, so they lie in another order."""
    assert weights(runs / "one local") == weights(runs / "two local") != weights(runs / "one")
    header = checkpoints.newest(runs / "two local" / "checkpoints").header
    assert header["layout"]["states"] == header["local"] == ["squares", "mean"]


def test_the_estimate_has_both_states_and_those_that_wait(runs: Path) -> None:
    estimate, taken = json.loads((runs / "found.json").read_text())["memory"]
    assert estimate == pytest.approx(taken, rel=0.01)


def test_mistakes_are_told(runs: Path) -> None:
    found = json.loads((runs / "found.json").read_text())
    assert found["refused"] == "optim.memory is 2.0; it must be at least 0 and below 1"
    assert "must be one of: sgd, lars, damped" in found["unknown"]
    kept = "it has mean and squares of each weight, and this one keeps momentum"
    assert f"is of another optimiser: {kept}; resume with the run's own optim.method" in found["other"]
