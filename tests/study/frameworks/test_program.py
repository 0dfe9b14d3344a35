"""A framework's job on real ranks leaves an ordinary run directory, or one clear message."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from deepex.cli.show import show
from deepex.recipes import recipe
from deepex.record import PHASES, RunDirectory
from deepex.study.frameworks import FRAMEWORKS
from deepex.study.frameworks.program import main
from tests.full import examples, in_full
from tests.mpi import own_lines
from tests.pool import RankPool
from tests.study.frameworks.running import SMALL, need, run_framework, trained, write_config
from tests.training.on_ranks import train_on

pytestmark = pytest.mark.slow


@in_full
@pytest.mark.parametrize("size", [1, 2])
def test_ddp_learns_what_deepex_learns_from_gradients(
    size: int, ranks: RankPool, make_data: Callable[[int], Path], tmp_path: Path
) -> None:
    data = str(make_data(200))
    theirs = trained("pytorch", size, tmp_path / "ddp", data=data)
    keys = {**SMALL, "data": data, "sync.strategy": "gradients"}
    ours = train_on(ranks, recipe("fashion", keys), tmp_path / "deepex", size=size)
    for mine, other in zip(ours.epochs(), theirs.epochs(), strict=True):
        assert (mine.samples, mine.steps, mine.rate) == (other.samples, other.steps, other.rate)
        assert other.train.loss == pytest.approx(mine.train.loss, rel=1e-4)
        assert other.train.get("error") == pytest.approx(mine.train.get("error"), abs=0.011)
        assert mine.validation is not None
        assert other.validation is not None
        assert other.validation.loss == pytest.approx(mine.validation.loss, rel=1e-3)
        assert other.validation.samples == 64


def test_the_run_directory_is_an_ordinary_one(
    make_data: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("pytorch", 2, tmp_path / "run", data=str(make_data(193)))
    state, epoch = run.state, run.epochs()[-1]
    assert (state["status"], state["reason"], state["ranks"]) == ("finished", "2 epochs done", 2)
    assert state["framework"]["name"] == "pytorch"
    assert state["framework"]["settings"]["collectives"] == "gloo"
    assert (epoch.samples, epoch.steps, epoch.syncs) == (193, 7, 7)  # 97 and 96 of them, in batches of 16
    assert epoch.phases == {name: [0.0, 0.0] for name in PHASES}
    assert min(epoch.wall) > 0
    assert all(used > 1e7 for used in epoch.usage["memory_bytes"]["epoch"])
    assert run.config["sync"]["strategy"] == "gradients"
    show(run=str(run.path), base=None, targets=[], as_json=False)
    assert "lenet-caffe, 431,080 parameters" in capsys.readouterr().out
    again = run_framework("pytorch", 1, run.path, data=str(make_data(193)))
    assert again.returncode == 2
    assert "already holds a run" in own_lines(again.stderr)[0]
    assert run.state["status"] == "finished"


def test_a_target_ends_it(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    run = trained("pytorch", examples(1, 2), tmp_path / "run", data=str(make_data(200)), epochs=9, target="loss <= 100")
    assert run.state["reason"] == "target reached: loss <= 100"
    assert len(run.epochs()) == 1


def test_a_rank_that_fails_ends_the_job(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    done = run_framework("pytorch", 2, tmp_path / "run", data=str(make_data(200)), net="tests.study.frameworks.failing:network")
    assert done.returncode != 0
    assert "rank 1 on" in done.stderr
    assert "ArithmeticError: the third step went wrong" in done.stderr
    state = RunDirectory.open(tmp_path / "run").state
    assert state["status"] == "failed"
    assert state["reason"].startswith("rank 1: ArithmeticError: the third step went wrong (")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_gets_the_remedy(
    name: str, make_data: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    config = write_config(tmp_path / "a.toml", data=str(make_data(200)))
    monkeypatch.setattr(metadata, "version", nothing)
    with pytest.raises(SystemExit) as ended:
        main([name, str(config), "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"deepex: {name} cannot be compared with: ")
    assert "not installed: `pip install " in said
    assert said.strip().endswith(json.loads((tmp_path / "run" / "failure.json").read_text())["reason"])


def test_what_is_installed_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    assert json.loads(capsys.readouterr().out)["pytorch"]["version"].startswith("torch 2")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


@pytest.mark.parametrize(("net", "ranks"), [("lenet", 1), ("resnet18", 1), ("lenet-caffe", 2), ("resnet18", 2)])
@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "pytorch"])
def test_peers_learn_what_ddp_learns(name: str, net: str, ranks: int, make_data: Callable[[int], Path], tmp_path: Path) -> None:
    """With momentum and decay; on two ranks with shards of 97 and 96, or 100 and 99 samples, of which the last steps differ."""
    need(name)
    # Batch norm over few samples magnifies what is rounded: with batch 16 losses of ResNet-18 are 7 % apart after 26 steps.
    count, batch, rate = (199, 50, 5e-4) if net == "resnet18" else (193, 16, 0.02)
    keys = {"data": str(make_data(count)), "net": net, "batch": batch, "optim__weight_decay": 0.01, "optim__rate": rate}
    expected = trained("pytorch", ranks, tmp_path / "ddp", **keys).epochs()
    run = trained(name, ranks, tmp_path / "peer", **keys)
    assert run.state["framework"]["name"] == name
    for theirs, epoch in zip(expected, run.epochs(), strict=True):
        assert (epoch.samples, epoch.steps, len(epoch.wall)) == (count, theirs.steps, ranks)
        assert epoch.train.loss == pytest.approx(theirs.train.loss, rel=2e-3)
        assert epoch.validation is not None
        assert theirs.validation is not None
        if net != "resnet18":  # statistics: unbiased variances in PyTorch; rank 0's with DDP, the mean of all with the others
            assert epoch.validation.loss == pytest.approx(theirs.validation.loss, rel=2e-3)


@pytest.mark.parametrize("name", ["jax", "keras"])
def test_a_network_that_is_not_translated_is_a_failure_with_its_reason(
    name: str, make_data: Callable[[int], Path], tmp_path: Path
) -> None:
    need(name)
    done = run_framework(name, 2, tmp_path / "run", data=str(make_data(200)), net="tests.study.frameworks.failing:network")
    assert done.returncode != 0
    assert len(own_lines(done.stderr)) == 1
    assert "no translation of Failing" in json.loads((tmp_path / "run" / "failure.json").read_text())["reason"]
