"""What a run used is in its record, costs no communication, and leaves nothing behind."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

import deepex
from deepex.cli.show import show
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError
from deepex.machine.storage import describe_file_system
from deepex.record import COMPUTE, PHASES, RunDirectory
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig
from deepex.training.resume import resumed_config
from deepex.training.watch import Watcher
from tests.pool import RankPool
from tests.training.on_ranks import train_on

MakeData = Callable[[int], Path]


def config(data: Path, **keys: object) -> RunConfig:
    values = {"net": "lenet", "data": str(data), "batch": 8, "epochs": 2, "threads": 1, "device": "cpu", "sampling": 0.01, **keys}
    return RunConfig(**values)


def left_behind() -> tuple[list[str], int]:
    """Our threads, and how many files are open."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("deepex-sampler")]
    return names, len(os.listdir("/proc/self/fd"))


def test_the_record_has_what_each_phase_used(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config(make_data(192), replicas=2), SoloCommunicator(), out=tmp_path / "run")
    for epoch in run.epochs():
        cpu = epoch.usage["cpu_seconds"]
        assert list(cpu) == [*PHASES, "other"]
        compute, wall = sum(cpu[phase][0] for phase in COMPUTE), 3 * epoch.phase_seconds("compute")
        assert 0.02 * wall < 3 * compute < 1.25 * wall, "one thread: a core at most, and less where other processes take it"
        assert compute > 0.5 * sum(cpu[phase][0] for phase in PHASES), "most of the work is in the compute phases"
        assert cpu["other"][0] > 0, "validation and checkpoints"
        assert epoch.usage["memory_bytes"]["epoch"][0] > 50 << 20, "torch alone takes more"
        assert "joules" not in epoch.usage or sum(epoch.usage["joules"]["forward"]) > 0


def test_checkpoints_are_bytes_of_no_phase(make_data: MakeData, tmp_path: Path) -> None:
    """The second epoch has the checkpoint of the first, which was written after its record."""
    kind = describe_file_system(tmp_path)["kind"]
    if kind in ("tmpfs", "overlay", "ramfs"):
        pytest.skip(f"the temporary directory is on {kind}, where nothing goes to a disk")
    run = deepex.train(config(make_data(64)), SoloCommunicator(), out=tmp_path / "run")
    written = run.epochs()[1].usage["written_bytes"]
    newest = max(path.stat().st_size for path in run.checkpoints.iterdir())
    assert written["other"][0] > newest > 100_000
    assert sum(written[phase][0] for phase in PHASES) < newest / 2


def test_the_series_is_in_the_run_directory(make_data: MakeData, tmp_path: Path) -> None:
    run = deepex.train(config(make_data(192)), SoloCommunicator(), out=tmp_path / "run")
    (lines,) = run.resources().values()
    assert {line["epoch"] for line in lines} == {1, 2}
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert sum(line["span_seconds"] for line in lines) == pytest.approx(lines[-1]["seconds"], abs=0.01)
    used = sum(line["cpu_cores"] * line["span_seconds"] for line in lines)
    recorded = sum(sum(map(sum, epoch.usage["cpu_seconds"].values())) for epoch in run.epochs())
    assert used >= 0.95 * recorded > 0, "the last checkpoint is in the series alone"


def test_without_sampling_only_what_feeds_count_is_known(
    make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deepex.train(config(make_data(64), sampling=0.0), SoloCommunicator(), out=tmp_path / "run")
    assert [set(epoch.usage) for epoch in run.epochs()] == [{"opens", "data_bytes"}] * 2
    assert run.resources() == {}
    show(run=str(run.path), base=None, targets=[], as_json=False)
    assert "what was used" not in capsys.readouterr().out


def test_sampling_changes_no_bit(make_data: MakeData, tmp_path: Path) -> None:
    keys = {"net": "tests.networks:normed", "deterministic": True, "replicas": 2, "sync": SyncConfig(period=2)}
    for sampling in (0.0, 0.01):
        deepex.train(config(make_data(64), sampling=sampling, **keys), SoloCommunicator(), out=tmp_path / str(sampling))
    with_, without = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("0.01", "0.0"))
    assert with_ == without


class Failing(Watcher):
    """Fails in the middle of an epoch, with the sampler running."""

    @override
    def stepped(self, samples: int) -> None:
        assert left_behind()[0] == ["deepex-sampler"]
        raise ZeroDivisionError


def test_nothing_is_left_behind(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(64)
    deepex.train(config(data, epochs=1), SoloCommunicator(), out=tmp_path / "first")  # loads libraries, which keep files open
    before = left_behind()
    assert before[0] == []
    deepex.train(config(data, epochs=1), SoloCommunicator(), out=tmp_path / "run")
    assert left_behind() == before
    with pytest.raises(ZeroDivisionError):
        deepex.train(config(data), SoloCommunicator(), out=tmp_path / "failed", watcher=Failing())
    assert left_behind() == before


def test_a_resumed_run_goes_on_with_its_series(make_data: MakeData, tmp_path: Path) -> None:
    out = tmp_path / "run"
    deepex.train(config(make_data(64), epochs=1), SoloCommunicator(), out=out)
    before = RunDirectory(out).resources()[""]
    deepex.train(resumed_config(out, {"epochs": 2}), SoloCommunicator(), out=out, resume=True)
    after = RunDirectory(out).resources()[""]
    assert after[: len(before)] == before
    assert after[-1]["epoch"] == 2
    assert after[-1]["seconds"] > before[-1]["seconds"]
    assert [epoch.usage.keys() for epoch in RunDirectory(out).epochs()] == [RunDirectory(out).epochs()[0].usage.keys()] * 2


IN_RANGE = r"sampling is \S+; it must be from 0\.01 to 3600 seconds, or 0"
FINITE = r"key 'sampling' is \S+; it must be a finite number"


@pytest.mark.parametrize(
    ("sampling", "rule"), [(-1.0, IN_RANGE), (0.001, IN_RANGE), (1e6, IN_RANGE), (float("nan"), FINITE), (float("inf"), FINITE)]
)
def test_an_interval_that_cannot_be_is_refused(sampling: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        RunConfig(net="lenet", data="sample:fashion", sampling=sampling)


@pytest.mark.ranks
def test_every_rank_has_its_usage(ranks: RankPool, make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks; the second sleeps in its forward pass, so that this is a phase of much time and little work."""
    keys = {"net": "tests.networks:troubled", "data": str(make_data(64)), "epochs": 2, "batch": 8, "sampling": 0.01, "threads": 1}
    run = train_on(ranks, deepex.recipe("fashion", keys), tmp_path / "run", TROUBLE="slow", TROUBLED_RANK="1")
    last = run.epochs()[-1]
    assert all(len(by_rank) == 2 for by_phase in last.usage.values() for by_rank in by_phase.values())
    asleep, cpu = 4 * 0.02, last.usage["cpu_seconds"]
    assert min(sum(by_rank[rank] for by_rank in cpu.values()) for rank in (0, 1)) > 0
    assert last.phases["forward"][1] - cpu["forward"][1] > asleep / 2, "who sleeps uses no core"
    assert min(last.usage["memory_bytes"]["epoch"]) > 50 << 20
    assert list(run.resources()) == [""], "one node, one file"
    show(run=str(run.path), base=None, targets=[], as_json=False)
    shown = capsys.readouterr().out
    assert "what was used, per epoch, by 2 rank(s) together" in shown
    assert "memory of a rank, at most" in shown
    show(run=str(run.path), base=None, targets=[], as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["epochs"][-1]["usage"] == last.usage
