"""The kernels of captured steps, run one by one on a CPU (Triton interprets them), against the eager runner. Graphs: tests/gpu."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import deepex
from deepex.arena import optimiser
from deepex.arena.arena import Arena
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.data.pack import pack
from deepex.errors import ConfigError
from deepex.recipes.network import build_network
from deepex.record.clock import NoClock
from deepex.step import choose
from deepex.step.captured.batch_table import BatchTable
from deepex.step.captured.bf16_weights import Bf16Weights
from deepex.step.captured.fusion import parts
from deepex.step.captured.runner import CapturedRunner
from deepex.training import build as build_module
from deepex.training import checkpoint as checkpoints
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from deepex.training.session import run_stretch
from tests.full import examples
from tests.training.stops import stop_after_laps

MakeData = Callable[[int], Path]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here: see tests/gpu")


def _arena_of_a_gpu(*arguments: Any, **options: Any) -> Arena:
    return Arena(*arguments, **options | {"gathers": True, "moves": False})


def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the captured runner what a CPU takes."""
    monkeypatch.setattr(build_module, "Arena", _arena_of_a_gpu)
    monkeypatch.setattr(choose, "make_eager", lambda parts, _step, _clock, _reason: (CapturedRunner(parts, NoClock()), NoClock()))


def _learner(monkeypatch: pytest.MonkeyPatch, config: RunConfig, *, captured: bool) -> Learner:
    if captured:
        _capture(monkeypatch)
    parts = build(make_job(config, SoloCommunicator(), build_network), SoloCommunicator(), clock=NoClock())
    monkeypatch.undo()
    return Learner(parts)


def _train(learner: Learner, epochs: int = 1) -> list[list[float]]:
    sums = []
    for epoch in range(epochs):
        learner.begin_epoch(epoch, 0)
        for stretch in learner.stretches():
            run_stretch(learner, stretch)
        sums.append(learner.parts.runner.sums.tolist())
    learner.parts.close()
    return sums


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images so small and few that kernels can be interpreted: 14 of 6×6, so that a last batch is smaller."""
    folder = tmp_path_factory.mktemp("small")
    images = np.random.default_rng(0).integers(0, 256, (14, 6, 6, 1), dtype=np.uint8)
    np.savez(folder / "some.npz", images=images, labels=np.arange(14) % 3)
    pack(folder / "some.npz", folder / "packed", classes=["a", "b", "c"], validation=0.0, layout="NHWC")
    return str(folder / "packed")


def _config(data: str, **changes: Any) -> RunConfig:
    own = {"net": f"{__name__}:tiny", "data": data, "batch": 5, "layout": "channels_last", "validate": "none"}
    return deepex.recipe("fashion", own | changes)


def tiny() -> nn.Module:
    """With windows of 2, which no thin kernel takes: those are slow to interpret, and the autoencoder below has them."""
    features = [nn.Conv2d(1, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32, 3))


def turning() -> nn.Module:
    """With dense layers behind maps and in front of them, few enough outputs and inputs that the weights are turned."""
    ends = [nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 4)], [nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(18, 3)]
    return nn.Sequential(*ends[0], nn.ReLU(), nn.Linear(4, 18), nn.Unflatten(1, (2, 3, 3)), nn.ReLU(), *ends[1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.momentum": 0.0, "optim.weight_decay": 0.01, "batch": 7},
        {"optim.nesterov": True, "optim.schedule": "cosine", "batch": 7},
        {"optim.method": "lars", "optim.weight_decay": 0.01, "batch": 7},
        {"sync.strategy": "gradients", "batch": 7},
        {"replicas": 3, "sync.period": 2, "batch": 2},
        {"replicas": 2, "sync.strategy": "gradients"},
        {"layout": "contiguous"},
        {"fuse": False},
    ],
    ids=str,
)
def test_the_same_arithmetic_as_eager(changes: dict, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(small, **changes)
    eager, captured = (_learner(monkeypatch, config, captured=choice) for choice in (False, True))
    assert isinstance(captured.parts.runner, CapturedRunner)
    assert bool(captured.parts.runner.choice.fusions) == (changes.keys() & {"layout", "fuse"} == set())
    assert torch.equal(captured.parts.arena.kept, eager.parts.arena.kept), "building it leaves the arena as it was"
    epochs = 1 if changes else 2
    expected, found = _train(eager, epochs), _train(captured, epochs)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    weights, reference = captured.parts.arena.kept, eager.parts.arena.kept
    assert float((weights - reference).norm() / reference.norm()) < 1e-5
    for one, other in zip(captured.parts.network.buffers(), eager.parts.network.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"sync.strategy": "gradients"}], ids=str)
def test_an_optimiser_without_a_kernel_of_its_own(changes: dict, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own update is part of the step, at rates that are on the device; the twin of the weights follows."""
    monkeypatch.setattr(optimiser, "OPTIMISERS", [*optimiser.OPTIMISERS, "tests.arena.toy_optimiser"])
    keys = {"batch": 7, "optim.schedule": "cosine", "optim.rate": 0.01}
    config = _config(small, net=f"{__name__}:turning", **keys, **changes)  # no bias has rounding for a gradient, as before norms
    for key, value in {"method": "damped", "memory": 0.9}.items():  # the keys of a configuration are those of its start
        object.__setattr__(config.optim, key, value)
    with monkeypatch.context() as patch:
        eager, captured = (_learner(patch, config, captured=choice) for choice in (False, True))
        before = eager.parts.arena.weights.clone()
        expected, found = _train(eager)[-1], _train(captured)[-1]
    assert list(captured.parts.arena.states) == ["mean", "squares"]
    assert all(bool(state.any()) for state in captured.parts.arena.states.values())
    exact = config.precision != "bf16"
    assert found == pytest.approx(expected, rel=1e-4 if exact else 0.1)
    moved, reference = captured.parts.arena.weights - before, eager.parts.arena.weights - before
    assert float((moved - reference).norm() / reference.norm()) < (1e-3 if exact else 0.5)
    shadow = captured.parts.runner._twin.shadow
    assert exact or torch.equal(shadow, captured.parts.arena.weights.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("draws", examples(["kernel"], ["torch", "kernel"]))
def test_an_autoencoder_learns_alike(draws: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch draws the captured step's numbers, too, they come from the step's seed and are the same; else they are others."""
    options = {"filters": 16, "features": 4}
    config = _config(small, net="cvae", task="reconstruct", net_options=options, batch=7, **{"optim.rate": 1e-4})
    with pytest.MonkeyPatch.context() as patch:
        if draws == "torch":
            patch.setattr(parts, "noise_like", lambda x, _key, _salt: torch.randn_like(x))
        eager, captured = (_learner(monkeypatch, config, captured=choice) for choice in (False, True))
        before = eager.parts.arena.weights.clone()
        found, expected = _train(captured)[-1], _train(eager)[-1]
    assert found == pytest.approx(expected, rel=1e-4 if draws == "torch" else 0.02)
    assert draws == "torch" or found != pytest.approx(expected, rel=1e-7)
    moved, reference = captured.parts.arena.weights - before, eager.parts.arena.weights - before
    assert float((moved - reference).norm() / reference.norm()) < (1e-4 if draws == "torch" else 0.5)


def test_weights_in_another_order_lie_where_nothing_else_does(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the twin leaves of the arena's gradients: the same bits as in memory of their own."""
    config = _config(small, net=f"{__name__}:turning", batch=14, precision="bf16")
    room, rooms, states = Bf16Weights.room, [], []

    def given(twin: Bf16Weights, parameter: nn.Parameter) -> torch.Tensor | None:
        rooms.append(room(twin, parameter))
        return rooms[-1]

    for stand_in in (given, lambda _twin, _parameter: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bf16Weights, "room", stand_in)
            learner = _learner(monkeypatch, config, captured=True)
        _train(learner)
        states.append(learner.parts.arena.kept)
        if stand_in is given:
            gradients = learner.parts.arena.gradients
            first, half = gradients.data_ptr() + gradients.nbytes // 2, gradients.nbytes // 2
            assert len(rooms) == 3, "three layers beside maps"
            assert all(first <= one.data_ptr() < first + half and bool(one.any()) for one in rooms)
    assert torch.equal(*states)


@pytest.mark.slow
@pytest.mark.parametrize("method", examples(["lars"], ["sgd", "lars"]))
def test_bf16_computes_with_a_twin_and_keeps_float32(method: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin lies where the arena has gradients, unless they are gathered there."""
    configs = (_config(small, precision=precision, **{"optim.method": method}) for precision in ("fp32", "bf16"))
    exact, rounded = (_learner(monkeypatch, config, captured=True) for config in configs)
    before = exact.parts.arena.weights.clone()
    _train(exact)
    _train(rounded)
    assert rounded.parts.arena.weights.dtype == torch.float32
    moved, other = exact.parts.arena.weights - before, rounded.parts.arena.weights - before
    once = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else PyTorch rounds the gradient of a kernel after each image
    assert 0 < float((moved - other).norm() / moved.norm()) < (0.1 if once else 0.2)
    shadow = rounded.parts.runner._twin.shadow
    torch.testing.assert_close(shadow.float(), rounded.parts.arena.weights, rtol=2**-7, atol=1e-30)
    assert (shadow.data_ptr() == rounded.parts.arena.gradients.data_ptr()) == (method == "sgd")


def test_the_twin_follows_whoever_changes_the_weights(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync, another replica's turn, a checkpoint: with weights of zero, every class is as likely as the others."""
    learner = _learner(monkeypatch, _config(small, precision="bf16", **{"optim.rate": 1e-12}), captured=True)
    learner.parts.arena.weights.zero_()
    assert _train(learner)[0][0] / 14 == pytest.approx(math.log(3), rel=1e-4)


def test_buffers_that_a_network_replaces(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(small, net=f"{__name__}:Replacing")
    eager, captured = (_learner(monkeypatch, config, captured=choice) for choice in (False, True))
    assert _train(captured)[-1] == pytest.approx(_train(eager)[-1], rel=1e-4)
    assert float(captured.parts.network.mean) == pytest.approx(float(eager.parts.network.mean), rel=1e-4) != 0.0


@pytest.mark.slow
def test_a_run_that_was_stopped_in_an_epoch_goes_on(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"augment.flip": True, "augment.pad": 1, "optim.schedule": "cosine"}
    config = _config(small, epochs=1, step="eager", **drawn)  # eager: what `_capture` replaces
    _capture(monkeypatch)
    whole = deepex.train(config, SoloCommunicator(), out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        laps = stop_after_laps(patch, 2)
        run = deepex.train(config, SoloCommunicator(), out=tmp_path / "cut")
    assert checkpoints.newest(run.checkpoints).position.step == 2
    deepex.train(config, SoloCommunicator(), out=run.path, resume=True)
    assert len(laps) == 2
    assert (run.path / "weights.safetensors").read_bytes() == (whole.path / "weights.safetensors").read_bytes()


def test_the_host_waits_for_what_it_queued_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that is as far as it says: laps 1 to 12 in groups of 3, and the last group is never waited for."""
    queued, finished, waits = [0], [0], []

    class Event:
        def __init__(self) -> None:
            self._at = 0

        def record(self) -> None:
            self._at = queued[0]

        def query(self) -> bool:
            return finished[0] >= self._at

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        waits.append((queued[0], finished[0]))
        finished[0] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "sleep", sleep)
    runner = object.__new__(CapturedRunner)
    runner._since, runner._stride, runner._nap, runner._queued = 0, 3, 0.5, Event()
    for lap in range(1, 13):
        queued[0] = lap
        runner._keep_pace()
    assert waits == [(6, 0), (6, 1), (6, 2), (9, 3), (9, 4), (9, 5), (12, 6), (12, 7), (12, 8)]


@given(
    count=st.integers(1, 40),
    replicas=st.integers(1, 4),
    batch=st.integers(1, 9),
    steps=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    data=st.data(),
)
def test_the_sizes_of_a_turns_batches(count: int, replicas: int, batch: int, steps: tuple[int, int], data: st.DataObject) -> None:
    """As the feeds have them, also of a turn that begins where its shard has ended."""
    assume(replicas * batch <= count)
    samples = object.__new__(Samples)
    samples.shards, samples.start = Shards(count, replicas, batch), 0
    source = object.__new__(BatchTable)
    source._inputs = SimpleNamespace(samples=samples)
    turn = Turn(data.draw(st.integers(0, replicas - 1), label="replica"), steps[0], sum(steps))
    assert source.batches(turn) == [end - begin for begin, end in samples.batches([turn])]


def test_a_network_that_counts_its_calls_is_refused(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgreedError, match="attributes"):
        _learner(monkeypatch, _config(small, net=f"{__name__}:Counting"), captured=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = tiny(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x) / self.calls


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.layers(x - self.mean)


def test_a_cpu_has_no_graphs(make_data: MakeData) -> None:
    config = deepex.recipe("fashion", {"data": str(make_data(48)), "step": "captured", "device": "cpu"})
    with pytest.raises(ConfigError, match="only a GPU"):
        Learner(make_job(config, SoloCommunicator(), build_network), SoloCommunicator())
