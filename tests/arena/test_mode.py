"""A layer's own mode: what its owner put into evaluation mode stays there while the others train."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.arena import Arena
from deepex.arena.mode import begin_training, evaluating
from deepex.comm.solo import SoloCommunicator
from deepex.study.frameworks.base import UnsupportedTask
from deepex.study.frameworks.layers import describe
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig
from tests import networks

MakeData = Callable[[int], Path]
HELD = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def _modes(network: nn.Module) -> list[bool]:
    return [module.training for module in network.modules()]


def test_a_layer_keeps_its_mode_when_training_begins_and_after_an_evaluation() -> None:
    network = networks.held_norm(1, 10)
    before = _modes(begin_training(network))
    assert before == [True, True, False, *[True] * 6]
    with evaluating(network):
        assert not any(_modes(network))
    assert _modes(network) == before
    with pytest.raises(RuntimeError, match="of size"), evaluating(network):
        network(torch.zeros(3))
    assert _modes(network) == before


class Keeping(nn.Sequential):
    """Keeps its batch norm from training, in the usual way."""

    def train(self, mode: bool = True) -> "Keeping":
        super().train(mode)
        self[0].eval()
        return self


def test_a_network_that_keeps_a_layer_from_training_is_asked_to() -> None:
    network = begin_training(nn.Sequential(Keeping(nn.BatchNorm2d(1), nn.Flatten()), nn.Dropout().eval()))
    assert _modes(network) == [True, True, False, True, False]
    with evaluating(network):
        pass
    assert _modes(network) == [True, True, False, True, False]


def test_a_network_in_evaluation_mode_as_a_whole_trains_as_a_whole() -> None:
    assert all(_modes(begin_training(networks.evaluating(1, 10))))


@pytest.mark.parametrize("statistics", ["running", "estimated"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_statistics_that_were_frozen_stay_to_the_bit(make_data: MakeData, tmp_path: Path, replicas: int, statistics: str) -> None:
    config = RunConfig(
        net="tests.networks:held_norm", data=str(make_data(50)), epochs=2, batch=8, replicas=replicas, statistics=statistics,
        seed=7, sync=SyncConfig(period=1),
    )  # fmt: skip
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.state["statistics"]["kind"] == statistics
    torch.manual_seed(7)
    begun, learnt = networks.held_norm(1, 10).state_dict(), load_file(run.path / "weights.safetensors")
    assert all(torch.equal(learnt[name], begun[name]) for name in HELD)
    moved = [name for name in begun if name not in HELD]
    assert not any(torch.equal(learnt[name], begun[name]) for name in moved)


def test_a_network_in_evaluation_mode_learns_its_statistics(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(net="tests.networks:evaluating", data=str(make_data(50)), epochs=1, batch=8)
    learnt = load_file(deepex.train(config, SoloCommunicator(), out=tmp_path / "run").path / "weights.safetensors")
    assert int(learnt["1.num_batches_tracked"]) == 7


def test_of_frozen_statistics_alone_nothing_is_estimated(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.arena.test_mode:frozen", data=str(make_data(50)), epochs=1, batch=8, replicas=2, statistics="estimated"
    )
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.state["statistics"] == {"kind": "running", "reason": "the network's running statistics are frozen"}


def frozen(channels: int, classes: int) -> nn.Module:
    network = networks.batch_normed(channels, classes)
    network[1].eval()
    return network


def test_what_is_averaged_has_no_frozen_statistics() -> None:
    network = networks.held_norm(1, 10)
    arena = Arena(network, torch.device("cpu"))
    assert {slot.name for slot in arena.layout.frozen} == {"1.running_mean", "1.running_var"}
    assert {slot.name for slot in arena.layout.buffers} == {"4.running_mean", "4.running_var"}
    assert arena.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert network[1].running_mean.untyped_storage().data_ptr() == arena.memory.untyped_storage().data_ptr()


def test_no_other_framework_is_given_a_frozen_norm_to_train() -> None:
    with pytest.raises(UnsupportedTask, match=r"BatchNorm2d.* in evaluation mode \(1\)"):
        describe(networks.held_norm(1, 10), (1, 28, 28))
