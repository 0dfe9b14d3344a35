"""Which runner is taken, and what a capture that failed leaves behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.step import choose
from deepex.step.eager import EagerStep

CUDA = torch.device("cuda")


class _Replacing(nn.Module):
    """Replaces its statistics, as written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        self.mean = 0.5 * self.mean + x.detach().mean(0) + 1
        return self.layer(x - self.mean)


def _arena(network: nn.Module) -> Arena:
    arena = Arena(network, torch.device("cpu"))
    arena.moves = False  # as on a GPU, where autograd adds to the arena's gradients itself
    for weight in arena.trainable:
        weight._post_accumulate_grad_hooks.clear()
    arena.take_back_gradients()
    return arena


def _parts(arena: Any, **config: Any) -> Any:
    seen_as = SimpleNamespace(
        memory=SimpleNamespace(device=CUDA),
        take_back_gradients=arena.take_back_gradients,
        take_back_buffers=arena.take_back_buffers,
    )
    shards = SimpleNamespace(batch=4)
    given = SimpleNamespace(**({"step": "auto", "deterministic": False} | config))
    return SimpleNamespace(options=given, arena=seen_as, samples=SimpleNamespace(shards=shards))


def _step(seconds: float) -> Any:
    return SimpleNamespace(trial_seconds=lambda _batch: seconds, sums=torch.zeros(2))


def _failing(arena: Arena, error: Exception) -> Any:
    def capture(*_: Any) -> Any:
        for weight in arena.trainable:
            weight.grad = None
        raise error

    return capture


@pytest.mark.parametrize("message", ["operation not permitted", ""])
def test_after_a_failed_capture_gradients_reach_the_arena(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    network = nn.Linear(4, 2)
    arena = _arena(network)
    monkeypatch.setattr(choose, "_captured", _failing(arena, RuntimeError(message)))
    runner, _ = choose.make_runner(_parts(arena), _step(1.0), steps=1000)
    assert runner.choice.kind == "eager"
    assert "RuntimeError" in runner.choice.reason
    arena.backward(network(torch.ones(3, 4)).sum())
    assert arena.gradients.any()


def test_a_deterministic_run_does_not_depend_on_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = _arena(nn.Linear(4, 2))
    monkeypatch.setattr(choose, "_captured", lambda *_: ("captured", None))
    for seconds in (1e-6, 1.0):
        assert choose.make_runner(_parts(arena, deterministic=True), _step(seconds), steps=10) == ("captured", None)
    runner, _ = choose.make_runner(_parts(arena), _step(1e-6), steps=10)
    assert runner.choice.kind == "eager"


def test_the_fastest_is_captured_however_short_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, short = _arena(nn.Linear(4, 2)), _step(1e-6)
    monkeypatch.setattr(choose, "_captured", _failing(arena, RuntimeError("out of memory")))
    runner, _ = choose.make_runner(_parts(arena, step="fastest"), short, steps=10)
    assert "out of memory" in runner.choice.reason
    monkeypatch.setattr(choose, "_captured", lambda *_: ("captured", None))
    assert choose.make_runner(_parts(arena, step="fastest"), short, steps=10) == ("captured", None)
    runner, _ = choose.make_runner(_parts(arena, step="fastest"), short, steps=10, begun="eager")
    assert runner.choice.kind == "eager"


def test_a_run_that_goes_on_keeps_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = _arena(nn.Linear(4, 2))
    monkeypatch.setattr(choose, "_captured", lambda *_: ("captured", None))
    short, long = _step(1e-6), _step(1.0)
    runner, _ = choose.make_runner(_parts(arena), long, steps=1000, begun="eager")
    assert (runner.choice.kind, runner.choice.reason.partition(":")[0]) == ("eager", "as the run began")
    assert choose.make_runner(_parts(arena), short, steps=10, begun="captured") == ("captured", None)
    assert choose.make_runner(_parts(arena, step="captured"), short, steps=10, begun="eager") == ("captured", None)
    runner, _ = choose.make_runner(_parts(arena, step="eager"), long, steps=1000, begun="captured")
    assert runner.choice.reason == "asked for"


def test_where_a_run_goes_on_a_failing_capture_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another GPU, or less of it may be free."""
    arena = _arena(nn.Linear(4, 2))
    monkeypatch.setattr(choose, "_captured", _failing(arena, RuntimeError("out of memory")))
    runner, _ = choose.make_runner(_parts(arena), _step(1.0), steps=10, begun="captured")
    assert "out of memory" in runner.choice.reason


def test_a_trial_leaves_a_network_that_replaces_its_buffers_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    network = _Replacing()
    arena = Arena(network, torch.device("cpu"))
    held = network.mean
    task: Any = SimpleNamespace(loss=lambda output, *_: output.sum(), measure_sums=lambda *_: [torch.zeros(())], measures=[None])
    prepare: Any = SimpleNamespace(raw_shape=(2, 2, 1))
    step = EagerStep(network, task, arena, prepare, precision="fp32")
    monkeypatch.setattr(step, "prepare", lambda raw, **_: raw.float())
    step.trial_seconds(4)
    assert network.mean is held
    assert not network.mean.any()
