"""A network that changes its own tensors while it runs: what it makes of them is trained and kept, or it is told."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.held import Held
from deepex.arena.network import twin
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError
from deepex.record import RunDirectory
from deepex.record.table import from_table, set_values, to_table
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig
from tests.pool import RankPool
from tests.training.on_ranks import train_on

MakeData = Callable[[int], Path]
Change = Callable[["Changing"], None]

_LIMIT = 0.03


class Changing(nn.Module):
    """Does something to itself in each forward pass from number `first` on. Its output depends on its buffers."""

    def __init__(self, change: Change, classes: int = 10, *, first: int = 0, persistent: bool = True) -> None:
        super().__init__()
        self.norm, self.dense = nn.BatchNorm2d(1), nn.Linear(784, classes)
        self.register_buffer("count", torch.zeros(()), persistent=persistent)
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64), persistent=persistent)
        self.register_buffer("spare", torch.ones(2, dtype=torch.int64))
        self.register_buffer("notes", torch.ones(2), persistent=False)
        self.change, self.first, self.passes = change, first, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes > self.first:
            self.change(self)
        output: torch.Tensor = self.dense(self.norm(images).flatten(1)) * (1 + 0.1 * ((self.count + self.whole) % 7))
        return output


def puts_data(network: Changing) -> None:
    network.dense.weight.data = network.dense.weight.data.clamp(-_LIMIT, _LIMIT)


def puts_parameter(network: Changing) -> None:
    network.dense.weight = nn.Parameter(network.dense.weight.detach().clone())


def freezes(network: Changing) -> None:
    network.dense.bias.requires_grad_(False)


def clamps(network: Changing) -> None:
    with torch.no_grad():
        network.dense.weight.clamp_(-_LIMIT, _LIMIT)


def halves(network: Changing) -> None:
    network.dense.weight.data.mul_(0.5)


def adds(network: Changing) -> None:
    network.count += 1


def adds_whole(network: Changing) -> None:
    network.whole += 1


def puts_buffer(network: Changing) -> None:
    network.count = network.count + 1


def puts_buffer_data(network: Changing) -> None:
    network.count.data = network.count.data + 1


def makes_a_layer(network: Changing) -> None:
    network.extra = nn.Linear(2, 2)


def makes_a_buffer(network: Changing) -> None:
    network.register_buffer("extra", torch.zeros(2))


def puts_another_shape(network: Changing) -> None:
    network.spare = torch.ones(3, dtype=torch.int64)


def puts_another_kind(network: Changing) -> None:
    network.whole = network.whole / 2


def takes_away(network: Changing) -> None:
    network.spare = None


def resizes(network: Changing) -> None:
    network.notes.resize_(40)


def caches(network: Changing) -> None:
    """As networks do with what they can always make anew: of another shape each time, or not there at all."""
    network.register_buffer("cache", torch.zeros(network.passes % 3), persistent=False)
    if network.passes % 4 == 0:
        del network.cache


CHANGES = (
    puts_data, puts_parameter, freezes, clamps, adds, adds_whole, puts_buffer, puts_buffer_data, makes_a_layer, makes_a_buffer,
    puts_another_shape, puts_another_kind, takes_away, caches, resizes,
)  # fmt: skip


def changing(classes: int, change: str, first: int = 0, persistent: bool = True) -> nn.Module:
    """For a configuration."""
    return Changing({one.__name__: one for one in CHANGES}[change], classes, first=first, persistent=persistent)


def config_of(data: Path, change: Change, *, epochs: int = 2, replicas: int = 1, **options: Any) -> RunConfig:
    net = "tests.arena.test_held:changing"
    return RunConfig(
        net=net, net_options={"change": change.__name__, **options}, data=str(data), batch=8, epochs=epochs, replicas=replicas,
        threads=1, deterministic=True, sampling=0, optim=deepex.recipe("fashion").optim,
    )  # fmt: skip


TOLD = [
    (puts_data, "puts another tensor in the place of its parameter 'dense.weight'"),
    (puts_parameter, "puts another tensor in the place of its parameter 'dense.weight'"),
    (freezes, "changes requires_grad of its parameter 'dense.bias'"),
    (makes_a_layer, "makes its parameter 'extra.bias' while it runs, and only what it began with is trained and kept"),
    (makes_a_buffer, "makes its buffer 'extra' while it runs"),
    (puts_another_shape, r"puts one of int64 \(3,\) in the place of its buffer 'spare' of int64 \(2,\)"),
    (puts_another_kind, r"puts one of float32 \(\) in the place of its buffer 'whole' of int64 \(\)"),
    (takes_away, r"puts nothing in the place of its buffer 'spare' of int64 \(2,\)"),
]


@pytest.mark.parametrize(("change", "said"), TOLD)
def test_parameters_that_are_replaced_are_refused_before_there_is_a_run(
    make_data: MakeData, tmp_path: Path, change: Change, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        deepex.train(config_of(make_data(48), change), SoloCommunicator(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("change", "said"), TOLD)
def test_those_that_are_replaced_later_end_the_run(make_data: MakeData, tmp_path: Path, change: Change, said: str) -> None:
    """In the second epoch, of 6 steps and a validation each."""
    with pytest.raises(ConfigError, match=said):
        deepex.train(config_of(make_data(48), change, first=10), SoloCommunicator(), out=tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    assert run.outcome[0] == "failed"
    assert re.search(said, run.outcome[1])
    assert len(run.epochs()) == 1
    assert not (run.path / "weights.safetensors").exists()


def test_weights_that_a_network_changes_in_place_are_those_that_are_delivered(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config_of(make_data(48), clamps), SoloCommunicator(), out=tmp_path / "run")
    assert load_file(run.path / "weights.safetensors")["dense.weight"].abs().max() < 2 * _LIMIT  # one update after the last clamp


def test_a_cache_may_come_and_go_and_change_its_shape(make_data: MakeData, tmp_path: Path) -> None:
    weights = [
        _weights(deepex.train(config_of(make_data(48), change, first=first), SoloCommunicator(), out=tmp_path / str(first)))
        for change, first in ((caches, 0), (caches, 10**6))
    ]
    assert _same(*weights)


def test_a_copy_to_try_shares_nothing() -> None:
    network = Changing(halves)
    before = network.dense.weight.detach().clone()
    twin(network)(torch.zeros(2, 1, 28, 28))
    assert torch.equal(network.dense.weight, before)


class Following(nn.Module):
    """A frozen teacher follows its student, from pass number `first` on."""

    def __init__(self, classes: int, first: int) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(784, classes), nn.Linear(784, classes).requires_grad_(False)
        self.first, self.passes = first, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.training and self.passes > self.first:
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.lerp_(other.data, 0.2)
        images = images.flatten(1)
        output: torch.Tensor = self.student(images) + self.teacher(images)
        return output


def following(classes: int, first: int) -> nn.Module:
    """For a configuration."""
    return Following(classes, first)


@pytest.mark.ranks
def test_a_teacher_that_follows_is_agreed_on(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Two replicas on one rank and on two are the same; it is the mean of both that is delivered."""
    keys = {"net_options.first": 0, "replicas": 2, "sync.period": 2}
    base = replace(config_of(make_data(48), adds), net="tests.arena.test_held:following", net_options={})
    config = from_table(RunConfig, set_values(to_table(base), keys))
    one = deepex.train(config, SoloCommunicator(), out=tmp_path / "one")
    assert _same(_weights(one), _weights(train_on(ranks, config, tmp_path / "two")))
    again = deepex.train(replace(config, epochs=3), SoloCommunicator(), out=tmp_path / "two", resume=True)
    whole = deepex.train(replace(config, epochs=3), SoloCommunicator(), out=tmp_path / "whole")
    assert _same(_weights(again), _weights(whole))


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_begins_to_follow_later_is_told_of(make_data: MakeData, tmp_path: Path, replicas: int) -> None:
    config = replace(config_of(make_data(48), adds, replicas=replicas), net="tests.arena.test_held:following")
    config = replace(config, net_options={"first": 4})
    if replicas == 1:
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
        return
    with pytest.raises(ConfigError, match=r"has changed frozen weights, .* \(some of 'teacher.weight', 'teacher.bias' …\)"):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")


def layers(classes: int, script: bool) -> nn.Module:
    """For a configuration."""
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, classes)))
    if script:
        network[3] = torch.jit.script(network[3])
    return network


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_a_part_that_is_torchscript_is_trained_as_the_module_is(make_data: MakeData, tmp_path: Path) -> None:
    weights = []
    for script in (False, True):
        config = replace(config_of(make_data(48), adds), net="tests.arena.test_held:layers", net_options={"script": script})
        weights.append(_weights(deepex.train(config, SoloCommunicator(), out=tmp_path / str(script))))
    assert _same(*weights)
    network = layers(10, True)
    twin(network)(torch.zeros(2, 1, 28, 28)).sum().backward()
    assert all(parameter.grad is None for parameter in network.parameters()), "its copies share nothing either"


@pytest.mark.parametrize("sync", [{"outer": "muon"}, {"strategy": "streaming"}, {"strategy": "elastic"}, {"wire": "int8"}])
def test_a_parameter_without_elements_does_no_harm(make_data: MakeData, tmp_path: Path, sync: dict[str, str]) -> None:
    weights = []
    for net in ("with_nothing", "without_it"):
        config = replace(config_of(make_data(48), adds, replicas=2), net=f"tests.arena.test_held:{net}", net_options={})
        config = replace(config, sync=SyncConfig(period=2, **sync))
        weights.append(_weights(deepex.train(config, SoloCommunicator(), out=tmp_path / net)))
    assert weights[0].pop("nothing").shape == (0, 5)
    assert _same(*weights)


def without_it(classes: int) -> nn.Module:
    """For a configuration."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))


def with_nothing(classes: int) -> nn.Module:
    """For a configuration."""
    network = without_it(classes)
    network.register_parameter("nothing", nn.Parameter(torch.zeros(0, 5)))
    return network


@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_are_the_same_however_they_are_changed_and_wherever_a_run_resumes(
    make_data: MakeData, tmp_path: Path, replicas: int
) -> None:
    """Validation changes none; one that is not written with the weights is in checkpoints too."""
    data, seen = make_data(96), {}
    for change in (adds, adds_whole, puts_buffer, puts_buffer_data):
        for persistent in (True, False):
            name = f"{change.__name__}-{persistent}"
            config = config_of(data, change, replicas=replicas, persistent=persistent)
            run = deepex.train(config, SoloCommunicator(), out=tmp_path / name)
            assert run.state["statistics"]["kind"] == ("running" if replicas == 1 else "estimated")
            seen[name] = _weights(run) | {"validation": torch.tensor([e.validation.loss for e in run.epochs() if e.validation])}
            first = config_of(data, change, replicas=replicas, persistent=persistent, epochs=1)
            deepex.train(first, SoloCommunicator(), out=tmp_path / f"{name}-resumed")
            again = deepex.train(config, SoloCommunicator(), out=tmp_path / f"{name}-resumed", resume=True)
            validation = torch.tensor([e.validation.loss for e in again.epochs() if e.validation])
            assert _same(_weights(again) | {"validation": validation}, seen[name]), name
    assert all(_same(seen["adds-False"], seen[name]) for name in seen if name.endswith("False"))
    steps = 2 * 96 // 8 // replicas
    for name in (name for name in seen if name.endswith("True")):
        assert seen[name].pop("count") + seen[name].pop("whole") == steps, name
        assert _same(seen["adds-False"], seen[name]), name


def test_what_is_held_is_looked_up_by_its_path() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    held = Held(network)
    held.check()
    network[1][0].bias = None
    with pytest.raises(ConfigError, match=r"its parameter '1\.0\.bias'"):
        held.check()


def _weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    return load_file(run.path / "weights.safetensors")


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {*one} == {*other} and all(torch.equal(one[name], other[name]) for name in one)


class Extra(nn.Linear):
    """Keeps a number beside its tensors, in the way that PyTorch has for it."""

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def with_extra_state(classes: int) -> nn.Module:
    """For a configuration."""
    return nn.Sequential(nn.Flatten(), Extra(784, classes))


def test_what_no_checkpoint_has_is_told(make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(net="tests.arena.test_held:with_extra_state", data=str(make_data(48)), batch=8, epochs=1, threads=1)
    deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deepex: the module '1' of the network has a get_extra_state(): what that gives is in no checkpoint")


def test_a_cache_is_not_resized_into_the_memory_of_others(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"puts one of float32 \(40,\) in the place of its buffer 'notes'"):
        deepex.train(config_of(make_data(48), resizes, persistent=False), SoloCommunicator(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
