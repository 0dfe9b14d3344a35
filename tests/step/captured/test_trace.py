"""Networks whose code does more than compute with its input: a trace must neither do it once for all, nor leave it out."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepex.step.captured.fusion import fuse
from deepex.step.captured.fusion.parts import FusionContext
from deepex.step.captured.linear_ops import Lane

CPU = torch.device("cpu")


class _Stateful(nn.Module):
    """A layer that does something to itself, or with chance, in front of its arithmetic."""

    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls, self._does = 0, does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self._does(self, x))


def _in_place(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    layer.mean.mul_(0.5).add_(x.detach().mean(0))
    return x - layer.mean


def _replaced(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    layer.mean = 0.5 * layer.mean + x.detach().mean(0)
    return x - layer.mean


def _counted(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    layer.seen += 1
    return x * 2


def _counted_here(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * layer.calls


def _noise(_: _Stateful, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(4)


def _chance(_: _Stateful, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 0.5 else x


def _numpy_chance(_: _Stateful, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.random())  # noqa: NPY002 - as a user may


def _no_grad(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer.first(x)


def _no_autocast(layer: _Stateful, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer.first(x).float()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    "does", [_in_place, _replaced, _counted, _counted_here, _noise, _chance, _numpy_chance, _no_grad, _no_autocast]
)
def test_what_a_network_does_beside_is_done_in_every_step(does: Callable[..., torch.Tensor], inner: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(_Stateful(does), nn.ReLU()) if inner else _Stateful(does)
    exact = copy.deepcopy(network)
    lane = Lane(CPU)
    fused = fuse(network, FusionContext(weights=lambda parameter: parameter, lane=lane, key=torch.ones(1, dtype=torch.int64)))
    for (name, buffer), expected in zip(network.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=f"{name} after fusing")
    for step in range(3):
        x = torch.randn(8, 4)
        found, expected = (_seeded(step, run, x) for run in (fused, exact))
        torch.testing.assert_close(found, expected)
        lane.clear()
        for parameter in (*network.parameters(), *exact.parameters()):
            parameter.grad = None
        found.sum().backward()
        expected.sum().backward()
        for (name, parameter), reference in zip(network.named_parameters(), exact.parameters(), strict=True):
            gradient = lane.gradient(parameter)
            assert (gradient is None) == (reference.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, reference.grad, msg=name)
    for (name, buffer), expected in zip(network.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)


def _seeded(step: int, run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(step)
    random.seed(step)
    np.random.seed(step)  # noqa: NPY002
    output: torch.Tensor = run(x)
    return output


def test_who_listens_to_a_gradient_hears_it() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    network[0].weight.register_hook(lambda gradient: gradient * 0)
    lane = Lane(CPU)
    fused = fuse(network, FusionContext(weights=lambda parameter: parameter, lane=lane, key=torch.ones(1, dtype=torch.int64)))
    fused(torch.randn(8, 4)).sum().backward()
    gradient = lane.gradient(network[0].weight)
    assert gradient is not None
    assert not gradient.any()
