"""Translated networks have the same parameters and the same outputs as those of PyTorch; see test_program for what they learn."""

import json

import pytest
from torch import nn

from deepex.study.frameworks.base import UnsupportedTask
from deepex.study.frameworks.layers import Convolution, MaxPool, count_parameters, describe, walk
from tests.mpi import run_ranks
from tests.study.frameworks.failing import network
from tests.study.frameworks.outputs import CASES, network_of
from tests.study.frameworks.running import need


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_parameter_is_there_once(name: str, shape: tuple[int, int, int]) -> None:
    built = network_of(name, shape)
    layers = describe(built, shape)
    assert count_parameters(layers) == sum(parameter.numel() for parameter in built.parameters())
    names = [layer.name for layer in walk(layers)]
    assert len(set(names)) == len(names)
    assert built.training


def test_a_pooling_that_rounds_up_reaches_over_the_edge() -> None:
    layers = describe(network_of("lenet-caffe", (1, 31, 30)), (1, 31, 30))
    pools = [layer for layer in layers if isinstance(layer, MaxPool)]
    assert [pool.sides for pool in pools] == [((0, 1), (0, 0)), ((0, 0), (0, 1))]
    assert sum(isinstance(layer, Convolution) for layer in layers) == 2


@pytest.mark.parametrize(
    ("module", "what"),
    [(nn.Dropout(0.5), "Dropout"), (nn.Conv2d(4, 4, 1, groups=2), "convolution"), (nn.AdaptiveAvgPool2d(2), "AdaptiveAvgPool2d")],
)
def test_what_has_no_translation_is_told(module: nn.Module, what: str) -> None:
    with pytest.raises(UnsupportedTask, match=f"no translation of .*{what}"):
        describe(nn.Sequential(nn.Conv2d(1, 4, 3), module), (1, 8, 8))


def test_a_chain_with_a_way_of_its_own_is_not_taken_for_a_plain_one() -> None:
    with pytest.raises(UnsupportedTask, match="no translation of Failing"):
        describe(network(1, (8, 8), 10), (1, 8, 8))


def test_shared_weights_are_not_taken_for_two() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(UnsupportedTask, match="a translation has 40 of the network's 20 parameters"):
        describe(nn.Sequential(nn.Flatten(), layer, layer), (1, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "keras"])
def test_outputs_are_those_of_pytorch(framework: str) -> None:
    need(framework)
    found = json.loads(run_ranks(1, "-m", "tests.study.frameworks.outputs", framework).stdout.splitlines()[-1])
    assert len(found) == 2 * len(CASES)
    for case, difference in found.items():
        assert difference < (1e-4 if "resnet" in case else 1e-5), case
