"""Optimisers in weights, against PyTorch's own and against the formula; rates against theirs."""

import copy
import math

import pytest
import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.arena.optimiser import make_optimiser
from deepex.arena.optimiser.base import State, state_policies
from deepex.arena.optimiser.config import OptimConfig
from deepex.arena.schedule import Schedule
from deepex.errors import ConfigError

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 36, 4))


def set_gradients(module: nn.Module, step: int, arena: Arena | None = None) -> None:
    """The same random gradients for each step, gathered in the arena or where autograd puts them."""
    generator = torch.Generator().manual_seed(step)
    gathered = arena is not None and arena.gathers
    slots = dict(zip([s.name for s in arena.layout.weights], arena.gradient_tensors(), strict=True)) if gathered else {}
    for name, parameter in module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name in slots:
            slots[name].copy_(value)
        elif parameter.requires_grad:
            parameter.grad = value  # contiguous, whatever order the weight has


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_pytorchs(momentum: float, nesterov: bool, decay: float, gathers: bool) -> None:
    if nesterov and not momentum:
        nesterov = False
    mine, theirs = network(), network()
    arena = Arena(mine, CPU, channels_last=True, gathers=gathers)
    optimiser = make_optimiser(OptimConfig(momentum=momentum, nesterov=nesterov, weight_decay=decay), arena)
    groups = [
        {"params": [theirs[0].weight, theirs[3].weight], "weight_decay": decay},
        {"params": [theirs[0].bias, theirs[1].weight, theirs[1].bias, theirs[3].bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=momentum, nesterov=nesterov)
    for step in range(4):
        set_gradients(mine, step, arena)
        set_gradients(theirs, step)
        optimiser.update(0.1)
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_ahead_is_what_updates_without_gradients_do(nesterov: bool) -> None:
    config, module = OptimConfig(momentum=0.8, nesterov=nesterov), network()
    arena = Arena(module, CPU)
    optimiser = make_optimiser(config, arena)
    set_gradients(module, 1, arena)
    optimiser.update(0.1)
    found = optimiser.ahead()
    weights, velocity = arena.weights.clone(), found.velocity.clone()
    assert velocity.abs().sum() > 0
    for steps in (1, 2, 3):
        arena.gradients.zero_()
        optimiser.update(0.1)
        assert torch.allclose(arena.weights, weights - 0.1 * found.ahead(steps) * velocity, atol=1e-6)
    assert make_optimiser(OptimConfig(momentum=0.0), arena).ahead() is None
    assert make_optimiser(OptimConfig(method="lars", momentum=0.8), arena).ahead().decay == 0.8


@pytest.mark.parametrize("gathers", [True, False])
def test_lars_is_its_formula(gathers: bool) -> None:
    """You et al. 2017, with the rate outside the momentum, as PyTorch's SGD has it."""
    mine = network()
    theirs = copy.deepcopy(mine)
    arena = Arena(mine, CPU, gathers=gathers)
    optimiser = make_optimiser(OptimConfig(method="lars", momentum=0.9, weight_decay=0.05, trust=0.01), arena)
    buffers = [torch.zeros_like(p) for p in theirs.parameters()]
    for step in range(3):
        set_gradients(mine, step, arena)
        set_gradients(theirs, step)
        optimiser.update(0.5)
        with torch.no_grad():
            for buffer, (name, p) in zip(buffers, theirs.named_parameters(), strict=True):
                g = p.grad
                if name in ("0.weight", "3.weight"):
                    ratio = 0.01 * p.norm() / (g.norm() + 0.05 * p.norm())
                    g = ratio * (g + 0.05 * p)
                buffer.mul_(0.9).add_(g)
                p.sub_(0.5 * buffer)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("gathers", [True, False])
def test_lars_scales_a_gradient_that_two_weights_share_once_for_each(gathers: bool) -> None:
    """Autograd gives both of a sum the same memory."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))

    network = Summed()
    arena = Arena(network, CPU, gathers=gathers)
    optimiser = make_optimiser(OptimConfig(method="lars", momentum=0.0, weight_decay=0.05, trust=0.01), arena)
    arena.backward(((network.one.reshape(-1) + network.other.reshape(-1)) * torch.arange(6.0)).sum())
    optimiser.update(1.0)
    gradient, weight = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    ratio = 0.01 * weight.norm() / (gradient.norm() + 0.05 * weight.norm())
    for parameter in (network.one, network.other):
        assert torch.allclose(parameter, weight - ratio * (gradient + 0.05 * weight), atol=1e-7)


@pytest.mark.parametrize("gathers", [True, False])
def test_frozen_weights_do_not_move(gathers: bool) -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.clone()
    arena = Arena(module, CPU, gathers=gathers)
    set_gradients(module, 0, arena)
    make_optimiser(OptimConfig(weight_decay=0.1), arena).update(0.1)
    assert torch.equal(module[0].weight, before)


def test_states_that_are_averaged_come_first() -> None:
    states = (State("a"), State("b", "reset"), State("c", "average"), State("d", "local"))
    assert list(state_policies(states, "local").items()) == [("c", "average"), ("a", "local"), ("b", "reset"), ("d", "local")]
    assert list(state_policies(states, "average")) == ["a", "c", "b", "d"]
    assert OptimConfig(momentum=0.0).policies("reset") == OptimConfig(method="lars").policies("reset") == {"momentum": "reset"}


def test_what_optimisers_declare_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"^key 'optim.method' is 'adom'; it must be one of: sgd, lars, for example 'sgd'$"):
        OptimConfig(method="adom")
    with pytest.raises(ConfigError, match=r"^optim\.trust is 0\.0; it must be above 0$"):
        OptimConfig(trust=0)
    with pytest.raises(ConfigError, match=r"^optim\.rate is 0\.0; it must be above 0 and at most 1e12$"):
        OptimConfig(rate=0)
    for method in ("sgd", "lars"):
        with pytest.raises(ConfigError, match=r"^optim\.nesterov is true with optim\.momentum 0: Nesterov needs momentum"):
            OptimConfig(method=method, nesterov=True, momentum=0)
    with pytest.raises(ConfigError, match=r"^optim\.schedule is step without optim\.decay_epochs: say when"):
        OptimConfig(schedule="step")


def rates(config: OptimConfig, *epochs: float, total_batch: int = 256) -> list[float]:
    schedule = Schedule(config, epochs=100, total_batch=total_batch)
    return [schedule.rate(epoch) for epoch in epochs]


def test_schedules() -> None:
    assert rates(OptimConfig(rate=0.1), 0, 50, 100) == pytest.approx([0.1, 0.1, 0.1])
    step = OptimConfig(rate=0.1, schedule="step", decay_epochs=(30, 60), decay=0.5)
    assert rates(step, 29.99, 30, 60) == pytest.approx([0.1, 0.05, 0.025])
    polynomial = OptimConfig(rate=0.1, schedule="polynomial", power=2, final=0.1)
    assert rates(polynomial, 0, 50, 100) == pytest.approx([0.1, 0.1 * (0.1 + 0.9 * 0.25), 0.01])
    cosine = OptimConfig(rate=0.1, schedule="cosine")
    assert rates(cosine, 0, 25, 50, 100) == pytest.approx([0.1, 0.05 * (1 + math.cos(math.pi / 4)), 0.05, 0.0])


def test_warm_up_and_linear_scaling() -> None:
    config = OptimConfig(rate=0.1, warmup_epochs=5, scale_batch=256)
    assert rates(config, 0, 2.5, 5, 50, total_batch=1024) == pytest.approx([0.0, 0.2, 0.4, 0.4])
    root = OptimConfig(rate=0.1, scale_batch=256, scaling="sqrt")
    assert rates(root, 1, total_batch=1024) == pytest.approx([0.2])
