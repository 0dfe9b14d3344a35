"""Nothing is lost: a run that is killed at any moment continues, exactly."""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.arena import Arena
from deepex.cli.show import show
from deepex.comm.solo import SoloCommunicator
from deepex.data.pack import pack
from deepex.errors import DamagedError, RunError, StorageError
from deepex.record import RunDirectory
from deepex.record.run import hold
from deepex.step.image_order import ImageOrder
from deepex.sync.agreement import KeptState
from deepex.sync.config import SyncConfig
from deepex.training import checkpoint as checkpoints
from deepex.training import tensors
from deepex.training.checkpoint import Position
from deepex.training.config import CheckpointConfig, RunConfig
from deepex.training.learner import Learner
from deepex.training.parts import Parts
from deepex.training.stop import StopPoll
from tests import networks
from tests.mpi import HANGS, ROOT, rank_environ, run_deepex
from tests.pool import RankPool
from tests.training.on_ranks import train_on

MakeData = Callable[[int], Path]


def settings(data: Path, *more: str) -> list[str]:
    keys = ("net=tests.networks:normed", f"data={data}", "batch=8", "deterministic=true", "sync.period=2", "validate=none", *more)
    return [f"--set={key}" for key in keys]


def weights(run: Path) -> bytes:
    return (run / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(make_data: MakeData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uninterrupted runs of 4 epochs, 4 replicas, for each momentum policy."""
    folder = tmp_path_factory.mktemp("whole")
    for momentum in ("average", "local"):
        config = RunConfig(
            net="tests.networks:normed", data=str(make_data(192)), batch=8, epochs=4, replicas=4,
            deterministic=True, validate="none", sync=SyncConfig(period=2, momentum=momentum), optim=deepex.recipe("fashion").optim,
        )  # fmt: skip
        deepex.train(config, SoloCommunicator(), out=folder / momentum)
    return {momentum: folder / momentum for momentum in ("average", "local")}


@pytest.fixture(scope="module")
def stopped(whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, each stopped by SIGTERM at the second sync of the second epoch, on 1 rank."""
    folder = tmp_path_factory.mktemp("stopped")
    for momentum, run in whole.items():
        with pytest.MonkeyPatch.context() as patch:
            _stop_after_syncs(patch, 3 + 2)
            deepex.train(_config_of(run), SoloCommunicator(), out=folder / momentum)
    return {momentum: folder / momentum for momentum in whole}


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of stop signals, put back after the test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


OTHERS = {"average": "local", "local": "average"}


@pytest.fixture(scope="module")
def on_ranks(ranks: RankPool, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs on 1 rank and on 2. `BEGAN-POLICY` took another momentum policy after its first epoch."""
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2)}
    for size, began, policy in ((s, b, p) for b, o in OTHERS.items() for s, p in ((1, o), (2, o), (1, "reset"))):
        run, config = folders[size] / f"{began}-{policy}", _config_of(whole[began])
        other = dataclasses.replace(config, epochs=2, sync=dataclasses.replace(config.sync, period="epoch", momentum=policy))
        for each, resume in ((dataclasses.replace(config, epochs=1), False), (other, True)):
            if size == 1:
                deepex.train(each, SoloCommunicator(), out=run, resume=resume)
            else:
                train_on(ranks, each, run, resume=resume)
    return folders


@pytest.mark.ranks
@pytest.mark.slow
def test_resume_in_the_middle_of_an_epoch_on_other_ranks(whole: dict[str, Path], stopped: dict[str, Path], tmp_path: Path) -> None:
    """Stopped on 1 rank; resume on 2, as a user does: the bits of the uninterrupted run."""
    run = tmp_path / "run"
    shutil.copytree(stopped["average"], run)
    result = run_deepex("train", "--resume", str(run), "--ranks=2", "-q")
    assert result.returncode == 0, result.stderr[-2000:]
    _compare_resumed(stopped["average"], run, whole["average"])


@pytest.mark.ranks
def test_resume_with_momentum_of_each_replica_on_other_ranks(
    whole: dict[str, Path], stopped: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped["local"], run)
    train_on(ranks, _config_of(run), run, resume=True)
    _compare_resumed(stopped["local"], run, whole["local"])


def _compare_resumed(stopped: Path, resumed: Path, whole: Path) -> None:
    directory = RunDirectory.open(stopped)
    assert directory.state["status"] == "stopped"
    assert "SIGTERM" in directory.state["reason"]
    header = checkpoints.newest(directory.checkpoints).header
    assert (header["epoch"], header["step"]) == (1, 4)
    assert not (stopped / "weights.safetensors").exists()
    assert weights(resumed) == weights(whole)
    assert RunDirectory.open(resumed).state["resumed"] == [2]
    epochs, untouched = RunDirectory.open(resumed).epochs(), RunDirectory.open(whole).epochs()
    assert [e.epoch for e in epochs] == [1, 2, 3, 4]
    assert [e.partial for e in epochs] == [False, True, False, False]
    assert [e.samples for e in epochs] == [192] * 4
    for mine, theirs in zip(epochs, untouched, strict=True):
        assert mine.train.loss == pytest.approx(theirs.train.loss, rel=1e-12)
        assert mine.train.get("error") == theirs.train.get("error")


@pytest.mark.ranks
@pytest.mark.parametrize(("began", "goes_on"), OTHERS.items())
def test_another_momentum_policy_from_a_checkpoint_on_is_the_same_on_any_ranks(
    began: str, goes_on: str, on_ranks: dict[int, Path]
) -> None:
    """4 replicas on 1 rank and on 2; a period that is the epoch, so that the momentum at its start is what differs from `reset`."""
    one, two, reset = (
        weights(on_ranks[ranks] / f"{began}-{policy}") for ranks, policy in ((1, goes_on), (2, goes_on), (1, "reset"))
    )
    assert RunDirectory.open(on_ranks[2] / f"{began}-{goes_on}").state["ranks"] == 2
    assert one == two
    assert one != reset


def _config_of(run: Path) -> RunConfig:
    from deepex.recipes import resumed_config

    return resumed_config(run, {})


def _stop_after_syncs(monkeypatch: pytest.MonkeyPatch, syncs: int) -> None:
    """Send ourselves a real SIGTERM just before sync number `syncs`."""
    calls = []
    original = SoloCommunicator.sum

    def counted(self: SoloCommunicator, tensor: torch.Tensor, weight: float = 1.0) -> None:
        calls.append(1)
        original(self, tensor, weight)

    begin = Learner.open

    def watched(self: Learner, *stretch: object) -> None:
        if len(calls) + 1 == syncs:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(self, *stretch)

    monkeypatch.setattr(SoloCommunicator, "sum", counted)
    monkeypatch.setattr(Learner, "open", watched)


class LatePoll:
    """Reads the requests as `StopPoll` does on a GPU: what was asked at one sync is known at the next."""

    def __init__(self, device: torch.device) -> None:
        self._asked = False

    def stop(self, requests: torch.Tensor) -> bool:
        known, self._asked = self._asked, bool(requests > 0)
        return known

    def settled(self) -> bool:
        return self._asked


@pytest.mark.parametrize("poll", [StopPoll, LatePoll])
def test_a_lone_replica_stops_between_two_steps(
    poll: type, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one replica nobody waits for anyone: a sync per epoch does not delay the end."""
    from deepex.step.eager import EagerStep

    steps = []
    backward = EagerStep.backward

    def counted(self: EagerStep) -> None:
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        backward(self)

    config = RunConfig(
        net="tests.networks:normed", data=str(make_data(192)), batch=8, epochs=2, deterministic=True, validate="none"
    )
    deepex.train(config, SoloCommunicator(), out=tmp_path / "whole")
    monkeypatch.setattr(EagerStep, "backward", counted)
    monkeypatch.setattr("deepex.training.session.StopPoll", poll)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "cut")
    monkeypatch.undo()
    position = checkpoints.newest(run.checkpoints).position
    assert (position.epoch, position.step) == (0, 5)
    deepex.train(config, SoloCommunicator(), out=tmp_path / "cut", resume=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_what_was_asked_in_an_epoch_is_known_at_its_end(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sync per epoch, an answer that comes one sync later would cost a whole epoch more."""
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=4, replicas=2, validate="none")
    monkeypatch.setattr("deepex.training.session.StopPoll", LatePoll)
    _stop_after_syncs(monkeypatch, 2)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.state["status"] == "stopped"
    assert len(run.epochs()) == 2


def test_a_signal_in_the_last_epoch_does_not_keep_a_run_from_being_finished(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=2, replicas=2, validate="none")
    _stop_after_syncs(monkeypatch, 2)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert (run.state["status"], run.state["reason"]) == ("finished", "2 epochs done")
    assert (run.path / "weights.safetensors").is_file()


@pytest.mark.ranks
@pytest.mark.slow
def test_sigterm_to_a_parallel_job_writes_a_checkpoint_and_ends_cleanly(make_data: MakeData, tmp_path: Path) -> None:
    """As a batch system does it: the signal goes to the launcher's process, the job ends with 0 and can be resumed."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "deepex", "train", "fashion", "--ranks=2", "--replicas=4", f"--out={run}", "-q"]
    keys = settings(make_data(192), "epochs=2000", "checkpoint.epochs=2000")  # so that the only checkpoint is that of the signal
    process = subprocess.Popen([*command, *keys], cwd=ROOT, env=rank_environ())
    _wait_for(lambda: (run / "epochs.jsonl").is_file() and len(RunDirectory.open(run).epochs()) >= 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANGS) == 0
    state = RunDirectory.open(run).state
    assert state["status"] == "stopped"
    position = checkpoints.newest(run / "checkpoints").position
    assert position.epoch >= 2
    longer = dataclasses.replace(_config_of(run), epochs=position.epoch + 1)
    deepex.train(longer, SoloCommunicator(), out=run, resume=True)
    assert RunDirectory.open(run).state["status"] == "finished"


def test_a_rank_that_stops_for_another_outlives_its_own_late_signal(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    """Ranks get their signals one after the other: one may come when the run has ended because of the first."""
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=2, replicas=2, validate="none")
    monkeypatch.setattr(StopPoll, "stop", lambda _self, _requests: True)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.state["reason"] == "stopped by a signal to another rank"
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def test_handlers_are_put_back_after_a_signal_of_our_own(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=2, replicas=2, validate="none")
    _stop_after_syncs(monkeypatch, 1)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert run.state["status"] == "stopped"
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def _train_apart(config: RunConfig, out: Path) -> multiprocessing.process.BaseProcess:
    """Begin a run in a process that can be killed: forked from one that has loaded torch, which takes most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.config", "deepex.recipes", "deepex.training.session"])
    process = context.Process(target=deepex.train, args=(config, SoloCommunicator()), kwargs={"out": out})
    process.start()
    return process


@pytest.mark.parametrize("moment", [0.0, 0.011, 0.037])
def test_a_killed_run_resumes_exactly(moment: float, whole: dict[str, Path], tmp_path: Path) -> None:
    """kill -9 at an arbitrary moment after the first checkpoint; then resume to the bits of the uninterrupted run."""
    run = tmp_path / "run"
    process = _train_apart(dataclasses.replace(_config_of(whole["average"]), checkpoint=CheckpointConfig(syncs=1)), run)
    _wait_for(lambda: any((run / "checkpoints").glob("*.json")) if run.exists() else False)
    time.sleep(moment)
    process.kill()
    process.join()
    deepex.train(_config_of(run), SoloCommunicator(), out=run, resume=True)
    assert weights(run) == weights(whole["average"])
    assert [e.epoch for e in RunDirectory.open(run).epochs()] == [1, 2, 3, 4]


def test_a_run_that_was_killed_at_its_target_does_not_go_beyond(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last epoch and checkpoint are written, its end is not."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    config = RunConfig(
        net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=3, validate="none", target="error <= 1"
    )
    monkeypatch.setattr("deepex.training.run._deliver", killed)
    with pytest.raises(KeyboardInterrupt):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    monkeypatch.undo()
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run", resume=True)
    assert (run.state["status"], run.state["reason"]) == ("finished", "target reached: error <= 1")
    assert len(run.epochs()) == 1
    assert (run.path / "weights.safetensors").is_file()
    further = dataclasses.replace(config, target="loss <= -1")
    assert len(deepex.train(further, SoloCommunicator(), out=run.path, resume=True).epochs()) == 3


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def test_only_the_newest_are_kept(whole: dict[str, Path]) -> None:
    names = sorted(path.name for path in (whole["average"] / "checkpoints").iterdir())
    assert names == [f"epoch00000{k}-step000000.{kind}" for k in (3, 4) for kind in ("json", "safetensors")]
    local = list((whole["local"] / "checkpoints").glob("*-momentum*.safetensors"))
    assert len(local) == 2 * 4


def test_what_a_kill_left_half_written_is_deleted_with_the_next_checkpoint(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    for name in (".epoch000001-step000003.safetensors.part", ".epoch000001-step000003-momentum000001.safetensors.part"):
        (run / "checkpoints" / name).write_bytes(bytes(1000))
    deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"epoch00000{k}-step000000.{kind}" for k in (1, 2) for kind in ("json", "safetensors")]


def test_the_millionth_step_is_newer_than_the_one_before(trained: tuple[RunConfig, Path]) -> None:
    folder = trained[1] / "checkpoints"
    for step in (999_998, 999_999, 1_000_000):
        for kind in ("json", "safetensors"):
            shutil.copy(folder / f"epoch000001-step000000.{kind}", folder / f"epoch000001-step{step:06d}.{kind}")
    assert checkpoints.newest(folder).path.stem == "epoch000001-step1000000"
    checkpoints._forget_old(folder, keep=2)
    assert {path.stem for path in folder.iterdir()} == {"epoch000001-step999999", "epoch000001-step1000000"}


@pytest.fixture
def trained(make_data: MakeData, tmp_path: Path) -> tuple[RunConfig, Path]:
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=1, validate="none")
    deepex.train(config, SoloCommunicator(), out=tmp_path / "trained")
    return config, tmp_path / "trained"


def _more(config: RunConfig, **keys: object) -> RunConfig:
    return RunConfig(**{**config.__dict__, "epochs": 2, **keys})


def test_a_resumed_run_keeps_its_choices_and_their_reasons(trained: tuple[RunConfig, Path]) -> None:
    """What was left to us is not taken for what was asked for: it might be another machine's the next time."""
    config, path = trained
    before = RunDirectory(path).state
    run = deepex.train(_more(_config_of(path)), SoloCommunicator(), out=path, resume=True)
    assert run.config["step"] == config.step == "auto"
    assert [run.state[key] for key in ("step", "layout")] == [before[key] for key in ("step", "layout")]
    assert "asked for" not in (run.state["step"]["reason"], run.state["layout"]["reason"])


def test_what_a_resume_changes_is_in_the_record(trained: tuple[RunConfig, Path], capsys: pytest.CaptureFixture[str]) -> None:
    config, path = trained
    told = []
    for keys in ({"epochs": 1}, {"epochs": 2}, {"epochs": 3, "batch": 4, "target": "loss <= 0"}):
        run = deepex.train(_more(_config_of(path), **keys), SoloCommunicator(), out=path, resume=True)
        told.append(run.state["changed"])
    first = {"epoch": 1, "step": 0, "keys": {"epochs": [config.epochs, 2]}}
    keys = {"batch": [config.batch, 4], "epochs": [2, 3], "target": ["", "loss <= 0"]}
    assert told == [[], [first], [first, {"epoch": 2, "step": 0, "keys": keys}]]
    show(run=str(path), base=None, targets=[], as_json=False)
    assert "changed    after 2 epochs, when it was resumed: epochs 2 → 3, batch 8 → 4" in capsys.readouterr().out


def test_a_truncated_checkpoint_is_named(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    path = next((run / "checkpoints").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=rf"{path.name} has \d+ bytes.* says \d+ bytes; the run has no other checkpoint"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_a_flipped_bit_in_a_checkpoint_is_found(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    path = next((run / "checkpoints").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"damaged: the checksum of .* does not match"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_a_flipped_bit_in_a_replicas_momentum_is_found(
    whole: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["local"], run)
    path = run / "checkpoints" / "epoch000004-step000000-momentum000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    config = dataclasses.replace(_config_of(run), epochs=5)
    deepex.train(config, SoloCommunicator(), out=run, resume=True)
    said = capfd.readouterr().err
    assert f"{path.name} is damaged: the checksum of momentum does not match" in said
    assert "going on from the checkpoint before, epoch000003-step000000.safetensors" in said
    assert weights(run) == weights(_one_more(whole["local"], tmp_path))


def _one_more(run: Path, folder: Path) -> Path:
    """The same run, whole, of one epoch more."""
    shutil.copytree(run, folder / "whole")
    deepex.train(dataclasses.replace(_config_of(run), epochs=5), SoloCommunicator(), out=folder / "whole", resume=True)
    return folder / "whole"


@pytest.mark.parametrize("garbage", [b"\xff" * 30, b"\x02" + bytes(7) + b"{}", b"\x04" + bytes(7) + b"null"])
def test_garbage_at_the_start_of_a_checkpoint_is_named(trained: tuple[RunConfig, Path], garbage: bytes) -> None:
    config, run = trained
    path = next((run / "checkpoints").glob("*.safetensors"))
    path.write_bytes(garbage + path.read_bytes()[len(garbage) :])
    with pytest.raises(RunError, match=rf"{path.name} cannot be read: "):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_a_checkpoint_without_its_header_does_not_exist(trained: tuple[RunConfig, Path]) -> None:
    _, run = trained
    next((run / "checkpoints").glob("*.json")).unlink()
    assert checkpoints.newest(run / "checkpoints") is None


@pytest.mark.parametrize(
    ("status", "epochs", "there"), [("finished", 1, True), ("failed", 1, False), ("running", 2, True)], ids=str
)
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_records(
    trained: tuple[RunConfig, Path], status: str, epochs: int, there: bool
) -> None:
    config, run = trained
    shutil.rmtree(run / "checkpoints")
    if there:
        (run / "checkpoints").mkdir()
    RunDirectory(run).set_state(status=status)
    line = (run / "epochs.jsonl").read_text(encoding="utf-8")
    lines = [line.replace('"epoch": 1,', f'"epoch": {number},') for number in range(1, epochs + 1)]
    (run / "epochs.jsonl").write_text("".join(lines), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(RunError, match=rf"has done {epochs} epochs?, but there is no checkpoint in .*/checkpoints: restore it, or"):
        deepex.train(_more(config, epochs=3), SoloCommunicator(), out=run, resume=True)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_checkpoints_of_another_run_are_refused(trained: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Of the same network too; a copy of a run, and one that was begun before runs had an id, have their own."""
    config, run = trained
    for name in ("copy", "other", "old"):
        shutil.copytree(run, tmp_path / name)
    RunDirectory(tmp_path / "other").set_state(id="0123456789abcdef")
    RunDirectory(tmp_path / "old").set_state(id="")
    with pytest.raises(
        RunError, match=r"checkpoint .*epoch000001-step000000\.safetensors is of another run than .*/other: take it"
    ):
        deepex.train(_more(config), SoloCommunicator(), out=tmp_path / "other", resume=True)
    for name in ("copy", "old"):
        assert len(deepex.train(_more(config), SoloCommunicator(), out=tmp_path / name, resume=True).epochs()) == 2
    assert weights(tmp_path / "copy") == weights(tmp_path / "old")


def test_a_run_whose_records_are_gone_is_not_resumed_with_a_gap(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    (run / "epochs.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match=r"epochs\.jsonl has 0 epochs, but 1 were done: restore it, or begin a new run"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    (run / "epochs.jsonl").unlink()
    with pytest.raises(RunError, match=r"has 0 epochs, but 1 were done"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    RunDirectory(run).set_state(status="running")
    deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    assert [record.epoch for record in RunDirectory(run).epochs()] == [1, 2]


def test_another_network_is_refused_with_the_tensor_that_differs(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    with pytest.raises(RunError, match=r"is of another network: 0\.(weight|bias) is .* in it and .* in this one"):
        deepex.train(_more(config, net="tests.networks:plain"), SoloCommunicator(), out=run, resume=True)


def test_a_refused_resume_leaves_the_run_as_it_was(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(RunError, match="resume with the run's own configuration"):
        deepex.train(_more(config, net="tests.networks:plain"), SoloCommunicator(), out=run, resume=True)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert len(deepex.train(_more(_config_of(run)), SoloCommunicator(), out=run, resume=True).epochs()) == 2


def test_a_run_that_goes_on_elsewhere_is_not_resumed(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    with hold(run), pytest.raises(RunError, match="is being written by process"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    assert len(deepex.train(_more(config), SoloCommunicator(), out=run, resume=True).epochs()) == 2


def test_of_two_runs_that_begin_in_one_directory_one_is_refused(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the directory empty when the first begins to write."""
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=1, validate="none")
    create = RunDirectory.create

    def meanwhile(*arguments: object) -> RunDirectory:
        monkeypatch.undo()
        with pytest.raises(RunError, match="is being written by process"):
            deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
        return create(*arguments)

    monkeypatch.setattr(RunDirectory, "create", meanwhile)
    assert len(deepex.train(config, SoloCommunicator(), out=tmp_path / "run").epochs()) == 1


def test_other_replicas_are_refused(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    with pytest.raises(RunError, match="was trained with 1 replicas; it cannot go on with 2"):
        deepex.train(_more(config, replicas=2), SoloCommunicator(), out=run, resume=True)


def test_fewer_epochs_than_are_done_are_refused(trained: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = trained
    deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    with pytest.raises(RunError, match="has done 2 epochs, and epochs is 1: set it to 2 at least"):
        deepex.train(config, SoloCommunicator(), out=run, resume=True)
    assert deepex.train(_more(config), SoloCommunicator(), out=run, resume=True).state["reason"] == "2 epochs done"
    _stop_after_syncs(monkeypatch, 1)
    deepex.train(_more(config, epochs=3, sync=SyncConfig(period=2)), SoloCommunicator(), out=run, resume=True)
    monkeypatch.undo()
    with pytest.raises(RunError, match="has done 2 epochs and a part of the next, and epochs is 2: set it to 3 at least"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_replicas_that_are_not_given_stay_as_many(make_data: MakeData, tmp_path: Path) -> None:
    """By default there are as many as ranks, of which a resumed run may have fewer."""
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=1, replicas=2)
    deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    run = deepex.train(_more(config, replicas=0), SoloCommunicator(), out=tmp_path / "run", resume=True)
    assert run.state["replicas"] == 2
    assert [epoch.samples for epoch in run.epochs()] == [64, 64]


@pytest.mark.parametrize("began", [False, True])
def test_the_layout_that_was_chosen_stays(
    began: bool, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial chooses it, and may find the other one faster the next time."""
    config = RunConfig(net="lenet", data=str(make_data(64)), batch=8, epochs=1)
    for resume in (False, True):
        choice = ImageOrder(channels_last=began != resume, reason="a trial")
        monkeypatch.setattr("deepex.training.gather.choose_order", lambda *_, _choice=choice, **__: _choice)
        run = deepex.train(_more(config) if resume else config, SoloCommunicator(), out=tmp_path / "run", resume=resume)
        assert run.config["layout"] == ("channels_last" if began else "contiguous")
    assert len(run.epochs()) == 2


@pytest.mark.parametrize("change", ["batch", "seed", "samples", "data"])
def test_within_an_epoch_what_tells_its_samples_stays(
    change: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = SyncConfig(period=2)
    config = RunConfig(net="tests.networks:normed", data=str(make_data(192)), batch=8, epochs=1, sync=sync, replicas=2)
    _stop_after_syncs(monkeypatch, 2)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    monkeypatch.undo()
    assert checkpoints.newest(run.checkpoints).header["step"] > 0
    other = {"batch": 16, "seed": 2, "samples": 96, "data": str(make_data(130))}[change]
    with pytest.raises(RunError, match=rf"stopped in the middle of an epoch.* {'dataset' if change == 'data' else change} "):
        deepex.train(dataclasses.replace(config, **{change: other}), SoloCommunicator(), out=run.path, resume=True)
    resumed = deepex.train(config, SoloCommunicator(), out=run.path, resume=True)
    assert [epoch.samples for epoch in resumed.epochs()] == [192]


@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_of_any_order_in_memory_are_kept(replicas: int, make_data: MakeData, tmp_path: Path) -> None:
    from tests.networks import masked

    config = RunConfig(net="tests.networks:masked", data=str(make_data(64)), batch=8, epochs=1, replicas=replicas)
    deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    run = deepex.train(_more(config), SoloCommunicator(), out=tmp_path / "run", resume=True)
    found, expected = load_file(run.path / "weights.safetensors"), masked(10).state_dict()
    assert torch.equal(found["mask"], expected["mask"])
    assert torch.equal(found["places"], expected["places"])


def test_the_final_weights_load_into_plain_pytorch(trained: tuple[RunConfig, Path]) -> None:
    from tests.networks import normed

    network = normed(1, 10)
    network.load_state_dict(load_file(trained[1] / "weights.safetensors"))
    assert network[1].num_batches_tracked == 8


_FILL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv[1:2] = []
from deepex.cli import main
main()
"""


@pytest.mark.slow
def test_a_full_disk_is_one_clear_message(make_data: MakeData, tmp_path: Path) -> None:
    """No file may grow over 100 kB, a checkpoint of LeNet takes 3.4 MB: exit code 1, one line, and no half-written file."""
    arguments = ["train", "fashion", f"--out={tmp_path / 'run'}", f"--set=data={make_data(64)}", "--set=epochs=1", "-q"]
    result = subprocess.run(
        [sys.executable, "-c", _FILL, "100000", *arguments],
        cwd=ROOT,
        env=rank_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "cannot write" in result.stderr
    assert "free space or raise the quota" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_disk_full_in_process(tmp_path: Path) -> None:
    """It is our error; nothing is left behind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"big\.safetensors.*(too large|large)"):
            tensors.write(tmp_path / "big.safetensors", {"x": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_headers_are_plain_json(trained: tuple[RunConfig, Path]) -> None:
    header = json.loads(next((trained[1] / "checkpoints").glob("*.json")).read_text())
    names = [slot[0] for slot in header["layout"]["weights"]]
    assert "0.weight" in names
    assert header["sums"] == [0.0, 0.0, 0.0]


def test_a_run_does_not_go_on_with_another_dataset_unless_it_is_told_to(tmp_path: Path) -> None:
    """Packed again with another seed, train and validation samples would be drawn anew, and mixed."""
    images = np.random.default_rng(0).integers(0, 256, (80, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", images=images, labels=np.arange(80) % 10)
    for name in ("data", "same"):
        pack(tmp_path / "i.npz", tmp_path / name, seed=1)
    config = RunConfig(net="tests.networks:normed", data=str(tmp_path / "data"), batch=8, epochs=1)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    pack(tmp_path / "i.npz", tmp_path / "data", seed=2, overwrite=True)
    longer = dataclasses.replace(config, epochs=2)
    with pytest.raises(RunError, match=r"was trained on another dataset .* --set data=DIR"):
        deepex.train(longer, SoloCommunicator(), out=run.path, resume=True)
    moved = dataclasses.replace(longer, data=str(tmp_path / "same"))
    assert len(deepex.train(moved, SoloCommunicator(), out=run.path, resume=True).epochs()) == 2
    other = dataclasses.replace(config, epochs=3)
    assert len(deepex.train(other, SoloCommunicator(), out=run.path, resume=True).epochs()) == 3


# Headers


def _damage(header: Path, **changes: object) -> None:
    header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0},
        {"epoch": 1.0},
        {"step": 1},
        {"syncs": 7},
        {"sums": [1.0, 2.0, 3.0]},
        {"apart": [1, 2.0]},
        {"lost": 1},
        {"worst": 9.0},
        {"rule": {"period": 3}},
        {"crc32": {"arena": 0}},
        {"replicas": 2},
        {"layout": {}},
        {"schema": 1},
        {"schema": 2},
        {"schema": 4},
        {"local": ["momentum"]},
        {"sha256": "0" * 64},
        {"sha256": None},
        {"more": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_edited_header_is_found(trained: tuple[RunConfig, Path], changes: dict[str, object]) -> None:
    config, run = trained
    _damage(next((run / "checkpoints").glob("*.json")), **changes)
    with pytest.raises(DamagedError, match=r"checkpoint .*\.json is damaged: .*; the run has no other checkpoint"):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_where_the_newest_is_damaged_the_one_before_is_taken(
    whole: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["average"], run)
    newest = run / "checkpoints" / "epoch000004-step000000.json"
    _damage(newest, step=1)
    again = deepex.train(_config_of(run), SoloCommunicator(), out=run, resume=True)
    said = capfd.readouterr().err
    assert f"deepex: checkpoint {newest} is damaged: what it says does not match its checksum; it is left out" in said
    assert weights(run) == weights(whole["average"])
    assert [epoch.epoch for epoch in again.epochs()] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_does_not_outlive_a_whole_one(trained: tuple[RunConfig, Path]) -> None:
    """It has the higher number; with `keep=1` the one that is written next would be deleted for it."""
    config, run = trained
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(keep=1))
    folder = run / "checkpoints"
    for kind in ("json", "safetensors"):
        shutil.copy(folder / f"epoch000001-step000000.{kind}", folder / f"epoch000009-step000000.{kind}")
    _damage(folder / "epoch000009-step000000.json", step=1)
    deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    assert checkpoints.newest(folder).position.epoch == 2


def _of_schema(schema: int, header: dict[str, object]) -> dict[str, object]:
    """A header as it was written before: of momentum alone; at first without a checksum, and with a key for each kind of tensor."""
    kept = {key: value for key, value in header.items() if key not in ("local", "sha256")}
    kept["layout"] = {key: value for key, value in header["layout"].items() if key != "states"}
    kept |= {"schema": schema, "momentum": "local" if header["local"] else "shared"}
    if schema == 2:
        return {**kept, "sha256": checkpoints._digest(kept)}
    del kept["run"]
    return {**kept, "crc32": header["crc32"]["arena"], "shared_crc32": {}}


@pytest.mark.parametrize(
    ("momentum", "schema", "key"),
    [("average", 1, ""), ("average", 2, ""), ("local", 1, "momenta_crc32"), ("local", 1, "own_crc32"), ("local", 2, "own_crc32")],
)
def test_checkpoints_of_earlier_schemas_are_read(  # noqa: PLR0917 - three are fixtures
    momentum: str, schema: int, key: str, stopped: dict[str, Path], whole: dict[str, Path], tmp_path: Path
) -> None:
    """To the bits of the uninterrupted run, and with another policy; the first had a key of its own for checksums of momenta."""
    run = tmp_path / "run"
    shutil.copytree(stopped[momentum], run)
    for path in (run / "checkpoints").glob("*.json"):
        table = _of_schema(schema, json.loads(path.read_text()))
        if key == "momenta_crc32":
            table[key] = table.pop("own_crc32")["momentum"]
        path.write_text(json.dumps(table))
    shutil.copytree(run, tmp_path / "other")
    deepex.train(_config_of(run), SoloCommunicator(), out=run, resume=True)
    assert weights(run) == weights(whole[momentum])
    config = dataclasses.replace(_config_of(run), sync=SyncConfig(period=2, momentum=OTHERS[momentum]))
    deepex.train(config, SoloCommunicator(), out=tmp_path / "other", resume=True)
    assert weights(tmp_path / "other") != weights(run)


def _arena(*states: str) -> Arena:
    torch.manual_seed(1)
    arena = Arena(nn.Linear(20, 30), torch.device("cpu"), states=states)
    for number, state in enumerate(arena.states.values()):
        state.fill_(number + 1)
    return arena


def _save(folder: Path, arena: Arena, **own: list[torch.Tensor]) -> checkpoints.Checkpoint:
    kept, comm = KeptState(own=own), SoloCommunicator()
    checkpoints.save(folder, Position(1), arena, nn.Module(), comm=comm, replicas=2, kept=kept, rule={}, keep=1)
    return checkpoints.newest(folder)


def test_states_in_another_order_are_read(tmp_path: Path) -> None:
    """What is averaged comes first, so the order is another where the policy of one has changed."""
    arena = _arena("squares", "mean", "third")
    found = _save(tmp_path, _arena("mean", "third", "squares"))
    checkpoints.restore(found, arena, nn.Module())
    assert {name: set(state.tolist()) for name, state in arena.states.items()} == {"mean": {1}, "third": {2}, "squares": {3}}


def test_states_that_are_local_now_or_no_longer(tmp_path: Path) -> None:
    """Replicas that shared a state each begin with it; the mean of what was their own is what they share."""
    arena = _arena("mean", "squares")
    own = [torch.full_like(arena.weights, value) for value in (3.0, 5.0)]
    found = _save(tmp_path, arena, squares=own)
    assert found.header["local"] == ["squares"]
    other, stored = _arena("squares", "mean"), [torch.zeros_like(state) for state in own]
    checkpoints.restore(found, other, nn.Module())
    checkpoints.restore_states(found, {"mean": stored}, 0, other)
    assert {name: set(state.tolist()) for name, state in other.states.items()} == {"squares": {4}, "mean": {1}}
    assert [set(state.tolist()) for state in stored] == [{1}, {1}]
    checkpoints.restore_states(found, {"squares": stored}, 0, other)
    assert [set(state.tolist()) for state in stored] == [{3}, {5}]


def test_states_of_another_optimiser_are_refused(tmp_path: Path) -> None:
    found = _save(tmp_path, _arena("mean", "squares"))
    for states, kept in ((("momentum",), "momentum"), ((), "nothing"), (("mean", "cubes"), "mean and cubes")):
        with pytest.raises(RunError, match=rf"it has mean and squares of each weight, and this one keeps {kept}; resume") as told:
            checkpoints.restore(found, _arena(*states), nn.Module())
        assert not isinstance(told.value, DamagedError)


@pytest.mark.parametrize(
    "changes",
    [
        {"states": None},
        {"states": "mean"},
        {"states": ["mean", 5]},
        {"states": ["mean", "mean"]},
        {"local": None},
        {"local": "mean"},
        {"local": ["cubes"]},
        {"local": [[]]},
        {"local": ["mean"]},
    ],
    ids=str,
)
def test_a_header_whose_states_cannot_be_is_damaged(changes: dict[str, object], tmp_path: Path) -> None:
    """Also if its checksum matches."""
    _save(tmp_path, _arena("mean", "squares"))
    path = next(tmp_path.glob("*.json"))
    header = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    if "states" in changes:
        header["layout"] |= changes
    else:
        header |= changes
    path.write_text(json.dumps({**header, "sha256": checkpoints._digest(header)}))
    with pytest.raises(DamagedError, match=r"is damaged: its (states are|'local' is) "):
        checkpoints.newest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": "locel"},
        {"crc32": None},
        {"layout": {}},
        {"layout": {"weights": [1], "frozen": [], "buffers": []}},
        {"shared_crc32": [1]},
        {"own_crc32": {"momentum": 5}},
        {"own_crc32": {"momentum": [1, 2, 3]}},
        {"replicas": 3},
        {"sums": [1.0]},
        {"epoch": -1},
        {"step": 0.5},
        {"syncs": 1 << 60},
        {"more": 1},
    ],
    ids=str,
)
def test_a_header_of_the_first_schema_is_read_as_it_was_written(
    trained: tuple[RunConfig, Path], changes: dict[str, object]
) -> None:
    config, run = trained
    header = next((run / "checkpoints").glob("*.json"))
    old = _of_schema(1, json.loads(header.read_text())) | {"own_crc32": {"momentum": [0]}}
    header.write_text(json.dumps({**old, **changes}))
    with pytest.raises(DamagedError):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


def test_another_way_to_keep_momentum_is_no_damage(make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each replica keeps has another size then; the checkpoint is whole and stays."""
    config = RunConfig(
        net="tests.networks:normed", data=str(make_data(192)), batch=8, epochs=2, replicas=2, validate="none",
        sync=SyncConfig(strategy="streaming", period=2, momentum="average"),
    )  # fmt: skip
    _stop_after_syncs(monkeypatch, 3)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    monkeypatch.undo()
    before = sorted(path.name for path in run.checkpoints.iterdir())
    other = dataclasses.replace(config, sync=dataclasses.replace(config.sync, momentum="reset"))
    with pytest.raises(RunError, match="resume with the run's own settings") as caught:
        deepex.train(other, SoloCommunicator(), out=run.path, resume=True)
    assert not isinstance(caught.value, DamagedError)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == before


def test_a_read_that_fails_in_passing_is_no_damage(trained: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = trained

    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(checkpoints, "read_into", fails)
    with pytest.raises(RunError, match="cannot be read: Too many open files; see that it can, and resume again") as caught:
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    assert not isinstance(caught.value, DamagedError)
    monkeypatch.undo()
    assert len(deepex.train(_more(config), SoloCommunicator(), out=run, resume=True).epochs()) == 2


def test_a_header_whose_floats_are_not_numbers_is_found(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    _damage(next((run / "checkpoints").glob("*.json")), sums=[float("nan"), 0.0, 1.0])
    with pytest.raises(DamagedError):
        deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)


# Files of tensors


def test_any_tensors_come_back_through_the_library(tmp_path: Path) -> None:
    """Of every type, of no number, on their own or as a view of others."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    held = {
        "view": base[:, 1::2],
        "none": torch.zeros(0, 3),
        "one": torch.tensor(5),
        **{str(dtype): torch.arange(5).to(dtype) for dtype in tensors._TYPES},
    }
    checksums = tensors.write(tmp_path / "held.safetensors", held)
    found = load_file(tmp_path / "held.safetensors")
    assert {*found} == {*held} == {*checksums}
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        target = torch.empty_like(found[name])
        assert tensors.read_into(tmp_path / "held.safetensors", name, target) == checksums[name]
        assert torch.equal(target, tensor)


def test_files_have_the_mode_that_the_umask_leaves(make_data: MakeData, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=1, validate="none")
        run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    finally:
        os.umask(before)
    files = [run.path / "weights.safetensors", *run.checkpoints.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_what_a_kill_left_half_written_is_cleared_away(trained: tuple[RunConfig, Path]) -> None:
    config, run = trained
    left = [run / "checkpoints" / name for name in (".epoch000009-step000000.safetensors.part", ".tmpAbCdEf")]
    for path in left:
        path.write_bytes(bytes(100))
    deepex.train(_more(config), SoloCommunicator(), out=run, resume=True)
    assert not any(path.exists() for path in left)


def test_weights_load_strictly_into_a_network_with_buffers_of_the_moment(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(net="tests.networks:with_passing_buffers", data=str(make_data(64)), batch=8, epochs=1, validate="none")
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    network = networks.with_passing_buffers()
    found = load_file(run.path / "weights.safetensors")
    network.load_state_dict(found)
    assert {*found} == {*network.state_dict()}
    with safe_open(next(run.checkpoints.glob("*.safetensors")), "pt") as held:
        assert {name for name in held.keys() if name.startswith("counter:")} == {"counter:seen", "counter:steps"}  # noqa: SIM118 - not a dict
    again = deepex.train(_more(config), SoloCommunicator(), out=run.path, resume=True)
    assert len(again.epochs()) == 2


# What cannot begin


def test_feeds_are_closed_if_the_start_fails(make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(net="tests.networks:normed", data=str(make_data(64)), batch=8, epochs=1, validate="none", placement="stream")

    def fails(*_: object) -> None:
        raise RunError("made up")

    closes, closed = Parts.close, list[Parts]()

    def watched(parts: Parts) -> None:
        closed.append(parts)
        closes(parts)

    monkeypatch.setattr("deepex.training.run.load", fails)
    monkeypatch.setattr(Parts, "close", watched)
    before = threading.active_count()
    with pytest.raises(RunError, match="made up"):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert threading.active_count() == before
    assert len(closed) == 1
    assert not (tmp_path / "run").exists(), "no run has begun, so the directory can be taken again"
