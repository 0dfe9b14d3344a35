"""What the loop promises about communication, synchronisation with the host, and phases."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import deepex
from deepex.arena.arena import Arena
from deepex.comm import Call, WrappedCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.recipes.network import build_network
from deepex.record import RunDirectory
from deepex.record.clock import SYNC, HostClock
from deepex.sync.config import SyncConfig
from deepex.training import build as build_module
from deepex.training import checkpoint as checkpoints
from deepex.training.build import build
from deepex.training.checkpoint import Checkpoint, CheckpointConfig, Position
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.session import Session, run_stretch
from deepex.training.watch import Watcher
from tests import networks
from tests.mpi import run_deepex
from tests.pool import RankPool
from tests.training.on_ranks import train_on

MakeData = Callable[[int], Path]


def make_session(tmp_path: Path, data: Path, log: list[Any], **keys: Any) -> Session:
    keys = {"net": "tests.networks:batch_normed", "batch": 8, "epochs": 2, "validate": "none", **keys}
    config = RunConfig(data=str(data), **keys)

    def note(call: Call) -> None:
        memory = [(one.data_ptr(), one.numel()) for one in call.arguments if isinstance(one, torch.Tensor)]
        log.append((call.what, *(memory[0] if memory else (0, 0))))

    comm = WrappedCommunicator(SoloCommunicator(), note)
    run = RunDirectory.create(tmp_path / "run", {}, [], {})
    return Session(build(make_job(config, comm, build_network), comm, clock=LoggingClock(log)), run, Watcher())


class LoggingClock(HostClock):
    """Notes each mark between the communicator's calls."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self._log = log

    def mark(self, phase: int) -> None:
        super().mark(phase)
        self._log.append(("mark", phase, 0))


@pytest.mark.parametrize(
    ("sync", "replicas", "region"),
    [
        (SyncConfig(period=3), 1, lambda arena: arena.model_and(1)),
        (SyncConfig(period=3, momentum="reset"), 1, lambda arena: arena.model),
        (SyncConfig(strategy="gradients"), 1, lambda arena: arena.gradients_and_buffers),
        (SyncConfig(period=3), 4, None),
    ],
)
def test_one_collective_per_sync_on_the_arena_itself(
    sync: SyncConfig, replicas: int, region: Callable[[Arena], torch.Tensor] | None, make_data: MakeData, tmp_path: Path
) -> None:
    log: list[tuple[str, int, int]] = []
    session = make_session(tmp_path, make_data(64), log, sync=sync, replicas=replicas)
    arena = session.parts.arena
    made = [entry for entry in log if entry[0] not in ("zeros", "gather_rows")]
    assert made == [("broadcast", arena.kept.data_ptr(), arena.kept.numel())], "the start is one broadcast of the state"
    assert {name for name, *_ in log} >= {"zeros", "gather_rows"}, "ranks make the arena, and agree on the kind of step"
    log.clear()
    session.train(Position())
    calls = [entry for entry in log if entry[0] != "mark"]
    syncs = sum(epoch.syncs for epoch in RunDirectory(tmp_path / "run").epochs())
    sums = [entry for entry in calls if entry[0] == "sum"]
    assert len(sums) == syncs > 1
    assert Counter(name for name, *_ in calls) == {"sum": syncs, "gather_rows": 2}, "one small gather per epoch, nothing else"
    if region is not None:
        memory = region(arena)
        assert set(sums) == {("sum", memory.data_ptr(), memory.numel())}, "in place, no copy made first"


def test_what_an_optimiser_keeps_of_a_replica_that_went_astray_is_forgotten(make_data: MakeData, tmp_path: Path) -> None:
    with make_session(tmp_path, make_data(64), [], sync=SyncConfig(momentum="local"), replicas=2) as session:
        learner = session.learner
        learner.begin_epoch(0, 0, worst=1e-9)
        run_stretch(learner, next(learner.stretches()))
        assert learner.lost == 2
        assert not any(momentum.any() for momentum in session.parts.states.stored()["momentum"])


def test_compute_phases_contain_no_collective(make_data: MakeData, tmp_path: Path) -> None:
    """The mark that follows a collective is the sync phase's; so its time is in no other phase."""
    log: list[tuple[str, int, int]] = []
    session = make_session(tmp_path, make_data(64), log, sync=SyncConfig(period=3), replicas=2)
    session.train(Position())
    sums = [index for index, entry in enumerate(log) if entry[0] == "sum"]
    assert sums
    for index in sums:
        assert log[index + 1] == ("mark", SYNC, 0)
        assert log[index - 1] == ("mark", SYNC, 0), "the phase before was closed first"


@pytest.mark.parametrize("samples", [64, 192])
def test_the_host_reads_the_device_once_per_epoch(
    samples: int, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of a tensor's value do not grow with the steps of an epoch (8 and 24), with one sync per epoch."""
    reads = Counter()
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *, _original: Any = original, _name: str = name) -> Any:
            reads[_name] += 1
            return _original(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    session = make_session(tmp_path, make_data(samples), [], epochs=1)
    reads.clear()
    session.train(Position())
    assert sum(reads.values()) <= 8, reads


@pytest.mark.ranks
def test_a_slow_rank_shows_as_slow(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Rank 1 sleeps in its forward pass: its forward time grows, and the other rank's wait is in its sync time."""
    keys = {"net": "tests.networks:troubled", "data": str(make_data(64)), "epochs": 2, "batch": 8, "validate": "none", "threads": 1}
    run = train_on(ranks, deepex.recipe("fashion", keys), tmp_path / "run", TROUBLE="slow", TROUBLED_RANK="1")
    last = run.epochs()[-1]
    forward, sync = last.phases["forward"], last.phases["sync"]
    asleep = 4 * 0.02
    assert forward[1] > asleep > forward[0]
    assert sync[0] > asleep / 2 > sync[1]


def test_a_checkpoint_within_an_epoch_is_in_no_phase(make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts anew after it: a slow file system does not show as time in sync."""
    log: list[Any] = []
    keys = {"sync": SyncConfig(period=2), "checkpoint": CheckpointConfig(syncs=1), "epochs": 1}
    session = make_session(tmp_path, make_data(64), log, **keys)
    monkeypatch.setattr(checkpoints, "save", lambda *_, **__: log.append("save"))
    monkeypatch.setattr(session.parts.clock, "start", lambda: log.append("start"))
    session.train(Position())
    after = [log[index + 1 : index + 2] for index, entry in enumerate(log) if entry == "save"]
    assert after == [["start"]] * 3 + [[]], "at three syncs within the epoch, and at its end"


def test_a_record_is_never_alone(make_data: MakeData, tmp_path: Path) -> None:
    config = deepex.recipe("fashion", {"data": str(make_data(64)), "epochs": 1, "replicas": 2, "seed": 7})
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.machine[0]["host"]
    assert run.machine[0]["versions"]["torch"] == torch.__version__
    assert run.config["seed"] == 7
    assert run.config["replicas"] == 2
    assert run.state["placement"]["reason"]
    assert run.state["comm"]["reason"]
    (epoch,) = run.epochs()
    assert epoch.measured
    assert epoch.samples == 64
    assert sum(epoch.phase_seconds(name) for name in epoch.phases) <= epoch.seconds * 1.001


def test_a_run_repeats_from_its_own_configuration(make_data: MakeData, tmp_path: Path) -> None:
    """In another process, which orders its sets and its memory differently."""
    keys = {"net": "tests.networks:normed", "data": str(make_data(64)), "deterministic": True, "epochs": 2, "replicas": 2}
    deepex.train(deepex.recipe("fashion", keys), SoloCommunicator(), out=tmp_path / "a")
    again = run_deepex("train", str(tmp_path / "a" / "config.toml"), f"--out={tmp_path / 'b'}", "-q")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "a" / "weights.safetensors").read_bytes() == (tmp_path / "b" / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_on_a_cpu(make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, supported: bool) -> None:
    """Where the CPU has no bf16, oneDNN is not asked for it; after the run it is as before."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    seen = []
    monkeypatch.setattr(networks.Looking, "look", lambda _self: seen.append(torch.backends.mkldnn.enabled))
    keys = {"net": "tests.networks:Looking", "data": str(make_data(64)), "epochs": 1, "precision": "bf16", "layout": "contiguous"}
    deepex.train(deepex.recipe("fashion", keys), SoloCommunicator(), out=tmp_path / "run")
    assert seen[-1] is supported
    assert torch.backends.mkldnn.enabled


# Replica 1 in epoch 1 gives no numbers, and replica 3 in epoch 2 absurd ones, by the ranks' own counts of passes.
STUMBLES = {1: "0:5:nan,0:23:1e6", 2: "0:5:nan,1:11:1e6", 4: "1:2:nan,3:5:1e6"}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_replica_that_loses_its_way_is_left_out(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Four replicas of three steps, on 1, 2 and 4 ranks: the same two are lost, each for an epoch, and the others go on."""
    weights = []
    keys = {"net": "tests.networks:stumbling", "data": str(make_data(96)), "epochs": 3, "batch": 8, "sync.momentum": "local"}
    keys |= {"sync.period": "epoch", "threads": 1, "replicas": 4}
    for size, stumbles in STUMBLES.items():
        out = tmp_path / str(size)
        if size == 2:  # as a user does, who is told
            words = (f"--ranks={size}", f"--out={out}", *(f"--set={key}={value}" for key, value in keys.items()))
            ended = run_deepex("train", "fashion", *words, STUMBLES=stumbles)
            assert ended.returncode == 0, ended.stderr[-2000:]
            assert ended.stdout.count("1 × a replica that had gone astray was left out") == 2
        else:
            train_on(ranks, deepex.recipe("fashion", keys), out, size=size, STUMBLES=stumbles)
        epochs = RunDirectory.open(out).epochs()
        assert [(epoch.lost, epoch.samples) for epoch in epochs] == [(1, 72), (1, 72), (0, 96)]
        assert all(0 < epoch.train.loss < 3 and epoch.train.samples == epoch.samples for epoch in epochs)
        assert all(epoch.drift["all"] < 0.5 for epoch in epochs)
        weights.append(load_file(out / "weights.safetensors"))
    for other in weights[1:]:
        assert all(torch.allclose(other[name], value, atol=1e-5) for name, value in weights[0].items())
    shown = run_deepex("show", str(tmp_path / "4")).stdout
    assert "a replica had gone astray: 1 in epoch 1, 1 in epoch 2" in " ".join(shown.split())


def test_a_resumed_run_knows_of_replicas_that_were_lost_before(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last epoch goes on from its first sync, before which replica 1 of 2 was lost; its passes are counted from there again."""
    monkeypatch.setenv("STUMBLES", "0:3:nan")
    keys = {"data": str(make_data(96)), "net": "tests.networks:stumbling", "replicas": 2, "batch": 8, "sync.period": 2}
    config = deepex.recipe("fashion", {**keys, "epochs": 1, "checkpoint.syncs": 1, "checkpoint.keep": 99})
    whole = deepex.train(config, SoloCommunicator(), out=tmp_path / "run").epochs()[0]
    for path in (tmp_path / "run" / "checkpoints").glob("epoch*"):
        if "epoch000000-step000002" not in path.name:
            path.unlink()
    (tmp_path / "run" / "epochs.jsonl").write_text("")
    monkeypatch.setenv("STUMBLES", "")
    resumed = deepex.train(config, SoloCommunicator(), out=tmp_path / "run", resume=True).epochs()[0]
    assert (whole.lost, whole.samples) == (resumed.lost, resumed.samples) == (1, 80)
    later = tmp_path / "run" / "checkpoints" / "epoch000000-step000004.json"
    assert json.loads(later.read_text())["lost"] == 1, "for whoever resumes again"
    assert resumed.train.loss == pytest.approx(whole.train.loss, rel=1e-5)


def test_a_checkpoint_knows_the_worst_loss_by_which_replicas_are_judged(make_data: MakeData, tmp_path: Path) -> None:
    keys = {"data": str(make_data(96)), "epochs": 3, "replicas": 2, "batch": 8, "sync.period": 3}
    run = deepex.train(
        deepex.recipe("fashion", {**keys, "checkpoint.syncs": 1, "checkpoint.keep": 99}), SoloCommunicator(), out=tmp_path / "run"
    )
    losses = [epoch.train.loss for epoch in run.epochs()]
    kept = [Checkpoint(path, json.loads(path.read_text())).position for path in run.checkpoints.glob("*.json")]
    assert {position.step for position in kept} == {0, 3}
    assert all(position.worst == max([0.0, *losses[: position.epoch]]) for position in kept)


def train_as_if_rank_0_could_capture(comm: Any, data: str, out: str) -> Any:
    """What the record says of the step."""
    make = build_module.make_runner

    def make_runner(parts: Any, step: Any, **options: Any) -> Any:
        runner, clock = make(parts, step, **options)
        if comm.rank == 0:
            runner.choice = dataclasses.replace(runner.choice, kind="captured", reason="as on a GPU")
        return runner, clock

    keys = {"data": data, "net": "tests.networks:plain", "batch": 8, "epochs": 1}
    with mock.patch.object(build_module, "make_runner", make_runner):
        return deepex.train(deepex.recipe("fashion", keys), comm, out=Path(out)).state["step"]


@pytest.mark.ranks
def test_ranks_run_one_kind_of_step_and_tell_what_each_would_have(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Rank 0 could capture its step, rank 1 could not."""
    step = ranks.run(train_as_if_rank_0_could_capture, make_data(64), tmp_path / "run")[0]
    assert step["kind"] == "eager"
    assert step["reason"].startswith("rank 1 cannot do else, a CPU: PyTorch's operators one by one")
    assert step["by_rank"] == [
        {"kind": "captured", "reason": "as on a GPU"},
        {"kind": "eager", "reason": "a CPU: PyTorch's operators one by one"},
    ]
