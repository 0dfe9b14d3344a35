"""A network that changes its own tensors while it runs: what it makes of them is trained and kept, or it is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.engine.config import RunConfig
from deepex.engine.network import Held, twin
from deepex.errors import ConfigError
from deepex.record import RunDirectory

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


CHANGES = (puts_data, puts_parameter, freezes, clamps, adds, adds_whole, puts_buffer, puts_buffer_data)


def changing(classes: int, change: str, first: int = 0, persistent: bool = True) -> nn.Module:
    """For a configuration."""
    return Changing({one.__name__: one for one in CHANGES}[change], classes, first=first, persistent=persistent)


def config_of(data: Path, change: Change, *, epochs: int = 2, replicas: int = 1, **options: Any) -> RunConfig:
    net = "tests.engine.test_held:changing"
    return RunConfig(
        net=net, net_options={"change": change.__name__, **options}, data=str(data), batch=8, epochs=epochs, replicas=replicas,
        threads=1, deterministic=True, sampling=0, optim=deepex.recipe("fashion").optim,
    )  # fmt: skip


TOLD = [
    (puts_data, "puts another tensor in the place of its parameter 'dense.weight'"),
    (puts_parameter, "puts another tensor in the place of its parameter 'dense.weight'"),
    (freezes, "changes requires_grad of its parameter 'dense.bias'"),
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
    assert said in run.outcome[1]
    assert len(run.epochs()) == 1
    assert not (run.path / "weights.safetensors").exists()


def test_weights_that_a_network_changes_in_place_are_those_that_are_delivered(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config_of(make_data(48), clamps), SoloCommunicator(), out=tmp_path / "run")
    assert load_file(run.path / "weights.safetensors")["dense.weight"].abs().max() < 2 * _LIMIT  # one update after the last clamp


def test_a_copy_to_try_shares_nothing() -> None:
    network = Changing(halves)
    before = network.dense.weight.detach().clone()
    twin(network)(torch.zeros(2, 1, 28, 28))
    assert torch.equal(network.dense.weight, before)


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
    config = RunConfig(net="tests.engine.test_held:with_extra_state", data=str(make_data(48)), batch=8, epochs=1, threads=1)
    deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deepex: the module '1' of the network has a get_extra_state(): what that gives is in no checkpoint")
