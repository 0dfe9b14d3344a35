"""Translated networks have the same parameters, the same outputs and the same updates as those of PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepex.comm.solo import SoloCommunicator
from deepex.nets import build
from deepex.study.frameworks import find
from deepex.study.frameworks.base import RankEpoch, UnsupportedTask
from deepex.study.frameworks.layers import Convolution, MaxPool, count_parameters, describe, walk
from deepex.study.frameworks.task import make_task
from tests.study.frameworks.running import need
from tests.study.frameworks.test_task import config

CASES = [
    ("lenet", (1, 28, 28)),
    ("lenet", (3, 33, 29)),
    ("lenet-caffe", (1, 28, 28)),
    ("lenet-caffe", (2, 31, 30)),  # whose poolings round up
    ("resnet18", (1, 28, 28)),
    ("resnet50", (3, 40, 37)),
]


def network_of(name: str, shape: tuple[int, int, int]) -> nn.Module:
    torch.manual_seed(0)
    return build(name, channels=shape[0], size=shape[1:], classes=10)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_parameter_is_there_once(name: str, shape: tuple[int, int, int]) -> None:
    network = network_of(name, shape)
    layers = describe(network, shape)
    assert count_parameters(layers) == sum(parameter.numel() for parameter in network.parameters())
    names = [layer.name for layer in walk(layers)]
    assert len(set(names)) == len(names)
    assert network.training


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("framework", ["jax", "keras"])
def test_outputs_are_those_of_pytorch(framework: str, name: str, shape: tuple[int, int, int]) -> None:
    need(framework)
    network = network_of(name, shape)
    layers, images = describe(network, shape), torch.randn(4, *shape)
    last = images.permute(0, 2, 3, 1).numpy()
    for training in (False, True):
        if framework == "jax":
            from deepex.study.frameworks.flax_network import make_flax

            flax, variables = make_flax(layers)
            found = flax.apply(variables, last, training, None, mutable=["batch_stats"])[0]
        else:
            from deepex.study.frameworks.keras_network import make_keras

            found = make_keras(layers, (*shape[1:], shape[0]))(last, training=training)
        with torch.no_grad():
            expected = network.train(training)(images).numpy()
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-3 if "resnet" in name else 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("net", ["lenet", "lenet-caffe", "resnet18"])
@pytest.mark.parametrize("framework", ["jax", "keras", "lightning"])
def test_learning_is_that_of_pytorch(framework: str, net: str, make_data: Callable[[int], Path]) -> None:
    """Three epochs of two steps, the second smaller: losses after some updates with momentum and decay are equal."""
    need(framework)
    keys = {"net": net, "batch": 32, "epochs": 3, "optim__weight_decay": 0.01, "deterministic": framework != "keras"}
    task = make_task(config(make_data(56), **keys), SoloCommunicator(), threads=1)
    found: dict[str, list[RankEpoch]] = {"pytorch": [], framework: []}
    for name, epochs in found.items():

        def told(epoch: RankEpoch, epochs: list[RankEpoch] = epochs) -> bool:
            epochs.append(epoch)
            return len(epochs) < 3

        training = find(name).build(task)
        training.run(told)
        training.close()
        assert training.settings["collectives"] == "none"
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.train.samples == theirs.train.samples == 56
        assert theirs.train.loss == pytest.approx(ours.train.loss, rel=2e-3)
        rel = 0.05 if net == "resnet18" else 2e-3  # of running variances, PyTorch's are the unbiased ones
        assert theirs.validation.loss == pytest.approx(ours.validation.loss, rel=rel)
        assert theirs.validation.samples == 64
