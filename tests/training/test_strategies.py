"""Whole runs with each strategy: resumed from any sync they end with the bits of the uninterrupted run; what the record tells."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.cli.show import show
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.errors import DivergedError, RunError
from deepex.record import RunDirectory
from deepex.record.table import from_table
from deepex.step.cost import forward_flops
from deepex.sync.config import SyncConfig
from deepex.training.checkpoint import CheckpointConfig
from deepex.training.config import RunConfig
from deepex.training.resume import resumed_config
from tests.full import FULL, examples
from tests.mpi import run_deepex
from tests.pool import RankPool
from tests.training.on_ranks import train_on
from tests.training.slow import train_slowly

MakeData = Callable[[int], Path]

STRATEGIES: dict[str, dict[str, Any]] = {
    "nesterov": {"outer": "nesterov", "outer_rate": 0.5, "outer_momentum": 0.5},
    "adam": {"outer": "adam"},
    "muon": {"outer": "muon", "momentum": "reset"},
    "elastic": {"strategy": "elastic"},
    "streaming": {"strategy": "streaming", "parts": 2, "momentum": "local"},
    "background": {"strategy": "background", "parts": 1},
    "background in parts": {"strategy": "background", "parts": 2},
    "hierarchical": {"strategy": "hierarchical", "group": 2, "between": 2, "outer": "slowmo"},
    "int8": {"wire": "int8"},
    "adacomm": {"period": "adacomm", "base": 2},
    "auto": {"period": "auto", "cost": 2.0, "tolerance": 0.02},
}


def config(data: Path, **sync: Any) -> RunConfig:
    """4 replicas of 6 steps, with batch norm, and a checkpoint after every sync."""
    changes = {"checkpoint.syncs": 1, "checkpoint.keep": 100}
    made = deepex.recipe("fashion", {"data": str(data), "epochs": 3, "batch": 8, "replicas": 4, "deterministic": True, **changes})
    keys = {"net": "tests.networks:normed", "optim": OptimConfig(rate=0.02), "sync": SyncConfig(**{"period": 1, **sync})}
    return RunConfig(**{**made.__dict__, **keys})


def bits(run: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run / "weights.safetensors").items()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_from_any_sync(name: str, make_data: MakeData, tmp_path: Path) -> None:
    """As if killed right after: all later checkpoints are gone. In the middle of an epoch, at the end of one, at the beginning."""
    whole = tmp_path / "whole"
    deepex.train(config(make_data(192), **STRATEGIES[name]), SoloCommunicator(), out=whole)
    headers = sorted((whole / "checkpoints").glob("*.json"))
    expected = bits(whole)
    names = [header.name for header in headers]
    middle = next(k for k, name in enumerate(names) if name.startswith("epoch000001-step") and "step000000" not in name)
    for last in examples((middle, middle + 1), (0, middle, middle + 1)):
        run = tmp_path / f"resumed{last}"
        shutil.copytree(whole, run)
        (run / "weights.safetensors").unlink()
        for header in headers[last + 1 :]:
            (run / "checkpoints" / header.name).unlink()
        found = deepex.train(from_table(RunConfig, RunDirectory.open(run).config), SoloCommunicator(), out=run, resume=True)
        assert bits(run) == expected, headers[last].name
        for before, after in zip(*(RunDirectory.open(path).epochs() for path in (whole, found.path)), strict=True):
            assert (before.train, before.syncs, before.period) == (after.train, after.syncs, after.period)
            if name != "background":  # whose last mean was on its way, and what to compare it with is not kept
                assert before.drift == pytest.approx(after.drift)


def test_another_strategy_cannot_take_over_what_replicas_have_of_their_own(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config(make_data(192), strategy="elastic"), SoloCommunicator(), out=tmp_path / "run")
    for header in sorted(run.checkpoints.glob("*.json"))[2:]:
        header.unlink()
    with pytest.raises(RunError, match=r"has weights of each replica, which this sync\.strategy does not know"):
        deepex.train(config(make_data(192), strategy="weights"), SoloCommunicator(), out=run.path, resume=True)


def test_the_record_tells_drift_and_why(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config(make_data(192), period="adacomm", base=3), SoloCommunicator(), out=tmp_path / "run")
    first, *_, last = run.epochs()
    assert first.period == "adacomm: the first epoch, 3"
    assert last.period.startswith("adacomm: ⌈√(")
    assert first.drift.keys() == {"all", "0.weight", "6.weight"}, "matrices and kernels"
    assert all(value > 0 for value in first.drift.values())
    assert first.moved.keys() == first.drift.keys()
    alone = deepex.train(
        RunConfig(**{**config(make_data(192)).__dict__, "replicas": 1}), SoloCommunicator(), out=tmp_path / "alone"
    )
    assert [(epoch.period, epoch.drift) for epoch in alone.epochs()] == [("", {})] * 3


def test_auto_looks_at_drift_after_the_first_stretch(make_data: MakeData, tmp_path: Path) -> None:
    """The rest of the epoch is planned by what was seen, and nothing else is different."""

    def run(rate: float, **sync: Any) -> RunDirectory:
        keys = {**config(make_data(192), **sync).__dict__, "optim": OptimConfig(rate=rate), "epochs": 1}
        return deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / f"{rate} {sync['period']}")

    syncs = {}
    for rate in (0.002, 0.2):
        auto = run(rate, period="auto", cost=2.0, tolerance=0.04)
        names = sorted(path.stem for path in auto.checkpoints.glob("epoch000000-*.json"))
        syncs[rate] = [int(name.partition("step")[2][:6]) for name in names]
        assert "; after 3 steps" in auto.epochs()[0].period
    assert syncs == {0.002: [3], 0.2: [3, 4, 5]}
    (first,), (same,) = RunDirectory.open(tmp_path / "0.002 auto").epochs(), run(0.002, period=3).epochs()
    assert (first.train, first.syncs) == (same.train, same.syncs)
    assert same.drift["all"] != first.drift["all"] > 0, "of the stretch after the look alone"


def test_estimated_statistics_are_those_of_the_agreed_weights(make_data: MakeData, tmp_path: Path) -> None:
    """They are validated and delivered; training goes on with the running ones, so the weights are the same."""
    runs = {}
    for kind in ("running", "estimated"):
        keys = {**config(make_data(192), period="epoch").__dict__, "statistics": kind, "net": "tests.networks:batch_normed"}
        runs[kind] = deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / kind)
        assert runs[kind].state["statistics"] == {"kind": kind, "reason": "asked for"}
    running, estimated = (load_file(run.path / "weights.safetensors") for run in runs.values())
    assert all(torch.equal(running[name], estimated[name]) for name in running if "running" not in name)
    assert torch.equal(running["1.num_batches_tracked"], estimated["1.num_batches_tracked"])
    assert not torch.allclose(running["1.running_var"], estimated["1.running_var"], rtol=0.05), "three steps are too few"
    kept = [load_file(max(run.checkpoints.glob("*.safetensors")))["arena"] for run in runs.values()]
    assert torch.equal(*kept), "the state from which training goes on is the same"
    losses = {kind: run.epochs()[0].validation.loss for kind, run in runs.items()}
    assert losses["estimated"] != losses["running"]
    dataset = PackedDataset.open(make_data(192))
    images, _ = dataset.part("train").read(0, 192)
    inputs = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - dataset.manifest.mean[0]) / dataset.manifest.deviation[0]
    maps = torch.nn.functional.conv2d(inputs, estimated["0.weight"], stride=4, padding=1)
    assert torch.allclose(estimated["1.running_mean"], maps.mean((0, 2, 3)), atol=0.02)
    assert torch.allclose(estimated["1.running_var"], maps.var((0, 2, 3)), rtol=0.1)


@pytest.mark.parametrize(("replicas", "kind"), [(1, "running"), (4, "estimated")])
def test_statistics_are_estimated_where_replicas_make_few_steps(
    replicas: int, kind: str, make_data: MakeData, tmp_path: Path
) -> None:
    keys = {**config(make_data(192)).__dict__, "replicas": replicas, "epochs": 1}
    run = deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / "run")
    assert run.state["statistics"]["kind"] == kind
    plain = deepex.train(RunConfig(**{**keys, "net": "tests.networks:plain"}), SoloCommunicator(), out=tmp_path / "plain")
    assert plain.state["statistics"] == {"kind": "running", "reason": "the network has no running statistics"}


def test_auto_is_settled_from_what_the_run_has(make_data: MakeData, tmp_path: Path) -> None:
    """8 replicas with 6 steps each: Muon, unless a step of it takes much longer than one of theirs; a resumed run goes on so."""
    data = make_data(192)
    keys = {**config(data).__dict__, "replicas": 8, "batch": 4, "epochs": 1, "sync": SyncConfig(strategy="auto")}
    run = deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / "run")
    assert (run.config["sync"]["outer"], run.config["sync"]["period"]) == ("muon", 1)
    assert run.state["sync"]["reason"].startswith("auto: 6 steps in an epoch are few: Muon at each")
    assert run.epochs()[0].syncs == 6
    settled, chosen = from_table(SyncConfig, run.config["sync"], "sync."), dict(run.state["sync"])
    again = deepex.train(RunConfig(**{**keys, "epochs": 2, "sync": settled}), SoloCommunicator(), out=tmp_path / "run", resume=True)
    assert again.state["sync"] == chosen
    assert [epoch.syncs for epoch in again.epochs()] == [6, 6]
    wide = deepex.train(RunConfig(**{**keys, "net": "lenet-caffe", "replicas": 2}), SoloCommunicator(), out=tmp_path / "wide")
    assert "Muon would take as long as" in wide.state["sync"]["reason"]
    assert wide.epochs()[0].period.startswith("auto: ")


@pytest.mark.parametrize(("momentum", "strategy"), [(0.9, "background"), (0.0, "auto")])
def test_auto_hides_syncs_that_it_is_told_are_long(momentum: float, strategy: str, make_data: MakeData, tmp_path: Path) -> None:
    """In an epoch of 100 steps or more, with momentum. A resumed run goes on so, and is the same as one that was never stopped."""
    keys = {**config(make_data(800)).__dict__, "replicas": 2, "batch": 4, "epochs": 2, "checkpoint": CheckpointConfig()}
    keys |= {"sync": SyncConfig(strategy="auto", cost=4.0), "optim": OptimConfig(rate=0.02, momentum=momentum)}
    whole = deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / "whole")
    assert (whole.config["sync"]["strategy"], whole.config["sync"]["period"]) == (strategy, "auto")
    assert whole.state["sync"]["strategy"] == strategy
    assert whole.config["sync"]["cost"] == (pytest.approx(0.58, rel=0.1) if strategy == "background" else 4.0)
    deepex.train(RunConfig(**{**keys, "epochs": 1}), SoloCommunicator(), out=tmp_path / "half")
    settled = from_table(SyncConfig, whole.config["sync"], "sync.")
    again = deepex.train(RunConfig(**{**keys, "sync": settled}), SoloCommunicator(), out=tmp_path / "half", resume=True)
    assert again.state["sync"] == whole.state["sync"]
    assert [epoch.train for epoch in again.epochs()] == [epoch.train for epoch in whole.epochs()]


@pytest.mark.ranks
@pytest.mark.parametrize(("overlaps", "strategy"), [(True, "background"), (False, "auto")])
def test_auto_hides_syncs_that_it_finds_to_be_long(
    overlaps: bool, strategy: str, ranks: RankPool, make_data: MakeData, tmp_path: Path
) -> None:
    """On two ranks whose sums take longer than steps; where another thread may call MPI.

    At the end of an epoch nobody waits for more than the weights: momentum is on its way while the network is validated.
    """
    found = ranks.run(train_slowly, make_data(800), tmp_path / "run", overlaps)[0]
    reason, summed = found["reason"], found["last"]
    assert found["chosen"] == strategy, reason
    assert found["period"].startswith("auto: "), found["period"]
    assert "because before the first epoch a sync took" in found["period"]
    if strategy == "background":
        cost, part = (float(word) for word in re.findall(r"takes ([\d.]+) steps, one of a part ([\d.]+)", reason)[0])
        assert cost / 8 == pytest.approx(part, rel=0.5), "a part of weights and statistics; a sync also has the momentum"
        assert 0.7 * summed[0] < summed[1] < summed[0], "momentum, and weights with their statistics"


@pytest.mark.parametrize(("strategy", "said"), [("background", True), ("weights", False)])
def test_a_run_that_diverges_names_a_strategy_that_may_not(strategy: str, said: bool, make_data: MakeData, tmp_path: Path) -> None:
    keys = {
        **config(make_data(192), strategy=strategy).__dict__,
        "deterministic": False,
        "layout": "contiguous",
        "optim": OptimConfig(rate=1e12),
    }
    with pytest.raises(DivergedError, match=r"lower optim\.rate") as raised:
        deepex.train(RunConfig(**keys), SoloCommunicator(), out=tmp_path / "run")
    assert ("set sync.strategy=weights" in str(raised.value)) == said


def test_operations_of_a_network() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 10))
    assert forward_flops(network, (1, 8, 8)) == 2 * (9 * 4 * 64 + 256 * 10)
    assert forward_flops(network, (1, 9, 9)) == 0, "it does not take these"
    assert network[1].num_batches_tracked == 0, "and it is left as it was"


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["background", "auto", "elastic"])
def test_strategies_on_two_ranks(
    sync: str, ranks: RankPool, make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--set sync=NAME` is for the strategy; background needs an MPI that threads may call."""
    keys = {"data": str(make_data(192)), "sync": sync, "sync.longest": 4, "epochs": 2, "batch": 8, "threads": 1}
    if sync != "auto":
        keys["sync.period"] = 2
    out = tmp_path / "run"
    if FULL:  # from the command line
        words = [f"--set={key}={value}" for key, value in keys.items()]
        result = run_deepex("train", "fashion", "--ranks=2", "--out", str(out), *words, "-q")
        assert result.returncode == 0, result.stderr[-2000:]
    else:
        train_on(ranks, deepex.recipe("fashion", keys), out)
    run = RunDirectory.open(out)
    assert run.config["sync"]["strategy"] == sync
    assert all(epoch.syncs >= 3 for epoch in run.epochs())
    assert run.epochs()[-1].train.loss < run.epochs()[0].train.loss
    if sync == "auto":
        assert all(epoch.period.startswith("auto: ") for epoch in run.epochs())
        show(run=str(out), base=None, targets=[], as_json=False)
        shown = capsys.readouterr().out
        assert "how replicas met" in shown
        assert f"{run.epochs()[0].drift['all']:.2%}" in shown
        assert run.state["sync"]["reason"] in shown


@pytest.mark.ranks
def test_background_resumes_where_each_rank_has_one_replica(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Between syncs its weights are in the arena alone, but for the part that is on its way."""
    keys = {"data": str(make_data(192)), "epochs": 2, "batch": 8, "threads": 1, "checkpoint.syncs": 1, "checkpoint.keep": 100}
    keys |= {"sync": "background", "sync.period": 1, "sync.parts": 3, "deterministic": True}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_on(ranks, deepex.recipe("fashion", keys), whole)
    shutil.copytree(whole, run)
    (run / "weights.safetensors").unlink()
    kept, *gone = sorted((run / "checkpoints").glob("*.json"))[4:]
    assert kept.name.startswith("epoch000000-step"), "in the middle of an epoch"
    for header in gone:
        header.unlink()
    train_on(ranks, resumed_config(run, {}), run, resume=True)
    assert bits(run) == bits(whole)
