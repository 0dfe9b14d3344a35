"""Recipes are complete, and what they train learns."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.data.pack import pack
from deepex.errors import ConfigError
from deepex.recipes import RECIPES, recipe
from deepex.recipes.network import build_network
from deepex.record.clock import NoClock
from deepex.record.table import dump_toml, from_table, to_table
from deepex.sync.mean import SharedArenaMean
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from tests.full import examples

MakeData = Callable[[int], Path]


PACKED = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "imagenet": (256, 256, 3)}  # what is not shipped, in its shape


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_builds_and_survives_toml(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    assert from_table(RunConfig, tomllib.loads(dump_toml(to_table(config)))) == config
    if name in PACKED:
        np.savez(tmp_path / "some.npz", images=np.zeros((128, *PACKED[name]), np.uint8), labels=np.arange(128) % 10)
        pack(tmp_path / "some.npz", tmp_path / "packed")
        config = dataclasses.replace(config, data=str(tmp_path / "packed"))
    job = make_job(config, SoloCommunicator(), build_network)
    assert sum(p.numel() for p in job.network.parameters()) > 1000
    assert RECIPES[name].__doc__


def test_changes_with_dots() -> None:
    config = recipe("fashion", {"sync.period": 16, "optim.rate": 0.1, "epochs": 3})
    assert (config.sync.period, config.optim.rate, config.epochs) == (16, 0.1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", examples(["fp32"], ["fp32", "bf16"]))
def test_lenet_learns_in_seconds(precision: str, tmp_path: Path) -> None:
    config = recipe(
        "fashion", {"epochs": 2, "net": "lenet", "replicas": 2, "precision": precision, "threads": 1, "target": "error <= 0.3"}
    )
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    epochs = run.epochs()
    assert epochs[-1].validation.get("error") < 0.35
    assert epochs[-1].validation.samples == 2000
    assert run.state["status"] == "finished"


def test_a_target_ends_the_run(tmp_path: Path) -> None:
    config = recipe("fashion", {"epochs": 50, "net": "lenet", "threads": 1, "target": "validation error <= 0.6"})
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert len(run.epochs()) < 50
    assert run.state["reason"] == "target reached: validation error <= 0.6"


def test_a_target_that_no_epoch_could_reach_is_refused(tmp_path: Path) -> None:
    """A dataset without a validation part; the run would not end before its last epoch."""
    np.savez(tmp_path / "i.npz", images=np.zeros((80, 28, 28), np.uint8), labels=np.arange(80) % 10)
    pack(tmp_path / "i.npz", tmp_path / "data", validation=0)
    config = RunConfig(net="lenet", data=str(tmp_path / "data"), batch=8, target="validation error <= 1")
    with pytest.raises(ConfigError, match=r"'validation error <= 1', but .*data has no validation part: set a target of train"):
        make_job(config, SoloCommunicator(), build_network)
    make_job(dataclasses.replace(config, target="error <= 1"), SoloCommunicator(), build_network)


@pytest.mark.slow
def test_an_autoencoder_learns(make_data: MakeData, tmp_path: Path) -> None:
    changes = {"data": str(make_data(192)), "epochs": 10, "batch": 16, "optim.rate": 0.0001, "threads": 1}
    config = recipe("fashion-cvae", {**changes, "net_options": {"filters": 8, "features": 16}, "target": "rmse <= 0.01"})
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    first, *_, last = run.epochs()
    assert last.train.get("rmse") < first.train.get("rmse") < 0.6
    assert last.validation.get("rmse") < first.validation.get("rmse") - 0.01
    assert last.train.get("error") is None


def test_placement_does_not_change_what_is_learnt(make_data: MakeData, tmp_path: Path) -> None:
    losses = {}
    for placement in ("device", "host", "stream"):
        keys = {"data": str(make_data(130)), "epochs": 2, "batch": 8, "replicas": 2, "deterministic": True, "placement": placement}
        run = deepex.train(recipe("fashion", keys), SoloCommunicator(), out=tmp_path / placement)
        assert run.state["placement"]["kind"] == placement
        losses[placement] = [epoch.train.loss for epoch in run.epochs()]
    assert losses["host"] == losses["stream"] == losses["device"]
    assert losses["device"][0] != losses["device"][1], "and it learns"


def test_the_settings_of_the_caller_are_as_before(make_data: MakeData, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        config = recipe("fashion", {"data": str(make_data(16)), "epochs": 1, "batch": 8, "deterministic": True})
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("momentum", ["average", "local", "reset"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_estimate_has_what_the_arena_and_the_agreement_take(
    replicas: int, momentum: str, deterministic: bool, make_data: MakeData
) -> None:
    sync = {"sync.momentum": momentum, "sync.period": 2, "deterministic": deterministic, "layout": "contiguous"}
    config = recipe("fashion", {"data": str(make_data(192)), "net": "lenet-caffe", "batch": 8, "replicas": replicas, **sync})
    job = make_job(config, SoloCommunicator(), build_network)
    parts = build(job, SoloCommunicator(), clock=NoClock())
    weights = sum(parameter.nbytes for parameter in job.network.parameters())
    agreement = parts.meeting.agreement
    sums = [agreement._last, agreement._total.buffer] if isinstance(agreement, SharedArenaMean) else []
    taken = [parts.arena.memory, *sums, *(state for states in parts.states.stored().values() for state in states)]
    assert job.placement.estimate["arena_bytes"] == pytest.approx(weights + sum(t.nbytes for t in taken), rel=0.01)
    parts.close()


def test_groups_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    changes = {"replicas": 4, "sync": "hierarchical", "sync.group": 3}
    with pytest.raises(ConfigError, match=r"sync\.group is 3, but there are 4 replicas, 4 on each rank"):
        make_job(recipe("fashion", changes), SoloCommunicator(), build_network)


@pytest.mark.parametrize(("batch", "replicas", "remedy"), [(21, 3, "batch=20"), (1, 1, "batch=2"), (16, 4, "batch=15")])
def test_a_last_batch_of_one_is_refused_where_batch_norm_has_too_little(
    batch: int, replicas: int, remedy: str, make_data: MakeData, tmp_path: Path
) -> None:
    """At once, and not at the end of the first epoch. A network without it may have such a batch."""
    changes = {"data": str(make_data({3: 192, 1: 130, 4: 196}[replicas])), "epochs": 1, "replicas": replicas, "batch": batch}
    with pytest.raises(ConfigError, match=f"leaves a last batch of 1 sample.*set {remedy}$"):
        make_job(recipe("fashion", {**changes, "net": "resnet18"}), SoloCommunicator(), build_network)
    make_job(recipe("fashion", {**changes, "net": "lenet"}), SoloCommunicator(), build_network)


@pytest.mark.parametrize("placement", ["device", "stream"])
def test_the_first_samples_alone_are_trained_on(placement: str, make_data: MakeData, tmp_path: Path) -> None:
    """Labels of the samples that the feed hands out, over an epoch, against those in the files."""
    data = make_data(128)
    config = recipe("fashion", {"data": str(data), "samples": 56, "batch": 8, "placement": placement, "replicas": 2, "threads": 1})
    parts = build(make_job(config, SoloCommunicator(), build_network), SoloCommunicator(), clock=NoClock())
    Learner(parts).begin_epoch(0, 0)
    seen = [int(label) for _ in range(8) for label in parts.feed.next()[1]]
    parts.close()
    assert sorted(seen) == sorted(PackedDataset.open(data).part("train").read(0, 56)[1].tolist())
    run = deepex.train(dataclasses.replace(config, epochs=1), SoloCommunicator(), out=tmp_path / "run")
    assert run.epochs()[0].samples == run.state["samples"]["train"] == 56


def test_more_samples_than_there_are(make_data: MakeData) -> None:
    with pytest.raises(ConfigError, match=r"samples is 65, but .* has 64 to train on: set at most that, or 0"):
        make_job(recipe("fashion", {"data": str(make_data(64)), "samples": 65, "batch": 8}), SoloCommunicator(), build_network)


@pytest.mark.parametrize("onednn", [True, False])
def test_onednn_is_used_as_asked_and_put_back(
    onednn: bool, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    real = Learner.begin_epoch

    def look(self: Learner, *arguments: Any, **keys: Any) -> None:
        found.append(bool(torch.backends.mkldnn.enabled))
        real(self, *arguments, **keys)

    monkeypatch.setattr(Learner, "begin_epoch", look)
    config = recipe("fashion", {"data": str(make_data(64)), "epochs": 1, "onednn": onednn, "threads": 1, "layout": "contiguous"})
    deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert found == [onednn]
    assert torch.backends.mkldnn.enabled
