import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.errors import RunError, StorageError
from deepex.record import COMPUTE, PHASES, EpochRecord, RunDirectory, Score
from deepex.record.measure import EARLIER, Measure
from deepex.record.run import SCHEMA, hold, is_held
from tests.full import examples


def make_epoch(number: int = 1, **changes: Any) -> EpochRecord:
    values = {
        "epoch": number,
        "samples": 100,
        "steps": 10,
        "syncs": 2,
        "rate": 0.1,
        "train": Score(loss=1.5, samples=100, measures={"error": 0.25}),
        "seconds": 3.0,
        "phases": {name: [1.0, 2.0] for name in PHASES},
        "wall": [2.5, 3.0],
    }
    return EpochRecord(**(values | changes))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"net": "lenet", "optim": {"rate": 0.1}}, [{"host": "n1"}], {"ranks": 2})


def lines(run: RunDirectory) -> Path:
    return run.path / "epochs.jsonl"


# Making and opening


def test_a_new_run_has_what_it_was_given(run: RunDirectory) -> None:
    opened = RunDirectory.open(run.path)
    assert opened.config == {"net": "lenet", "optim": {"rate": 0.1}}
    assert opened.machine == [{"host": "n1"}]
    assert opened.checkpoints.is_dir()
    assert opened.epochs() == []
    state = opened.state
    assert (state["schema"], state["status"], state["ranks"]) == (SCHEMA, "running", 2)
    assert datetime.fromisoformat(state["started"]).tzinfo == UTC


_HOLDER = """
import sys, time
from pathlib import Path
from deepex.record.run import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_two_processes_do_not_write_in_one_directory(run: RunDirectory) -> None:
    """The second is told of the first; a first that was killed keeps nobody out."""
    first = subprocess.Popen([sys.executable, "-c", _HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"is being written by process {first.pid} on \S+: wait until"), hold(run.path):
            pass
    finally:
        first.kill()
        first.communicate()
    with hold(run.path):
        pass


def test_a_run_whose_process_was_killed_is_told_from_one_that_is_written(run: RunDirectory) -> None:
    assert run.outcome == ("running", ""), "there is no lock, so nobody can tell"
    writer = subprocess.Popen([sys.executable, "-c", _HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        assert run.outcome == ("running", "")
    finally:
        writer.kill()
        writer.communicate()
    status, reason = run.outcome
    assert status == "killed"
    assert f"ended without a word; go on with `deepex train --resume {run.path}`" in reason
    assert run.state["status"] == "running", "who looks changes nothing"
    run.set_state(framework={"name": "jax"})
    assert "begin it anew" in run.outcome[1]
    run.set_state(status="stopped", reason="SIGTERM")
    assert run.outcome == ("stopped", "SIGTERM")


@pytest.mark.parametrize("holder", ["process 7 on another-host", "", "process 7", "\0" * 20])
def test_what_the_lock_cannot_tell_stays_as_the_run_says(run: RunDirectory, holder: str) -> None:
    (run.path / ".lock").write_text(holder, encoding="utf-8")
    assert run.outcome == ("running", "")


def test_without_locks_a_run_stays_as_it_says(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold(run.path):
        pass
    assert run.outcome[0] == "killed"

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert run.outcome == ("running", "")


def test_who_looks_whether_a_run_is_written_keeps_nobody_from_writing(run: RunDirectory) -> None:
    """To look is to hold the lock with others for a moment."""
    (run.path / ".lock").touch()
    descriptor = os.open(run.path / ".lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    threading.Timer(0.01, os.close, (descriptor,)).start()
    with hold(run.path):
        assert is_held(run.path)


def test_a_file_system_without_locks_keeps_nobody_out(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with hold(run.path), hold(run.path):
        pass


def test_a_run_is_never_overwritten(run: RunDirectory) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError) as caught:
        RunDirectory.create(run.path, {"net": "vgg"}, [], {})
    assert str(run.path) in str(caught.value)
    assert f"--resume {run.path}" in str(caught.value)
    assert "choose another --out" in str(caught.value)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_may_start_in_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    RunDirectory.create(tmp_path, {"net": "lenet"}, [], {})
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_the_state_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A create that is killed must not leave a run.json without its configuration: run.json makes the directory a run."""
    written = []
    replace_ = Path.replace

    def watched(path: Path, target: Path) -> Path:
        written.append(target.name)
        return replace_(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    RunDirectory.create(tmp_path / "run", {}, [], {})
    assert written == ["config.toml", "machine.json", "run.json"]


def test_a_place_where_no_directory_can_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match=r"cannot write .*file/run: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run", {}, [], {})


def test_opening_what_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone is not a run directory: it does not exist; give the directory that"):
        RunDirectory.open(tmp_path / "gone")


def test_opening_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no run\.json"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, None, "1"])
def test_a_schema_of_another_version_is_refused(run: RunDirectory, schema: Any) -> None:
    run.set_state(schema=schema)
    with pytest.raises(RunError) as caught:
        RunDirectory.open(run.path)
    assert f"schema {schema!r}" in str(caught.value)
    assert f"reads {SCHEMA}" in str(caught.value)
    assert "use the version that wrote it" in str(caught.value)


@pytest.mark.parametrize("text", ['{"schema": 1', "", "[]", "3", "null", '"run"'])
def test_a_damaged_state_is_named(run: RunDirectory, text: str) -> None:
    (run.path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError) as caught:
        RunDirectory.open(run.path)
    assert str(run.path) in str(caught.value)


@pytest.mark.parametrize(("part", "file"), [("config", "config.toml"), ("machine", "machine.json")])
def test_a_part_that_was_deleted_is_named(run: RunDirectory, part: str, file: str) -> None:
    (run.path / file).unlink()
    with pytest.raises(RunError, match=file):
        getattr(run, part)


# The state


def test_the_state_keeps_what_is_not_changed(run: RunDirectory) -> None:
    run.set_state(status="finished", reason="epochs")
    run.set_state(reason="target")
    assert (run.state["status"], run.state["reason"], run.state["ranks"]) == ("finished", "target", 2)


@pytest.mark.parametrize("value", [OSError(errno.ENOSPC, "No space left on device"), object()], ids=["disk full", "no JSON"])
def test_a_state_change_that_fails_changes_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    before = run.state
    with monkeypatch.context() as patch:
        if isinstance(value, OSError):

            def fail(_: int) -> None:
                raise value

            patch.setattr(os, "fsync", fail)
        with pytest.raises((StorageError, TypeError)):
            run.set_state(status="finished", extra="a" if isinstance(value, OSError) else value)
    assert run.state == before
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.toml", "machine.json", "run.json"]


# Epochs


amounts, times = st.floats(0, 1e9), st.floats(1e-6, 1e9)
counts = st.integers(0, 2**53)
scores = st.builds(
    Score,
    loss=st.floats(allow_nan=False, allow_infinity=False),
    samples=counts,
    measures=st.dictionaries(st.sampled_from(["error", "rmse", "iou"]), amounts),
    seconds=st.none() | amounts,
)


@st.composite
def epoch_records(draw: st.DrawFn) -> EpochRecord:
    num_ranks = draw(st.integers(1, 4))
    per_rank, walls = (st.lists(one, min_size=num_ranks, max_size=num_ranks) for one in (amounts, times))
    return EpochRecord(
        epoch=draw(st.integers(1, 99)),
        samples=draw(counts),
        steps=draw(counts),
        syncs=draw(counts),
        rate=draw(amounts),
        train=draw(scores),
        seconds=draw(times),
        phases={name: draw(per_rank) for name in PHASES},
        wall=draw(walls),
        validation=draw(st.none() | scores),
        partial=draw(st.booleans()),
        measured=draw(st.booleans()),
        finished=draw(st.text(max_size=30)),
    )


def numbered(records: list[EpochRecord]) -> list[EpochRecord]:
    """As a run would write them."""
    return [replace(record, epoch=number) for number, record in enumerate(records, start=1)]


def fresh(factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(factory.mktemp("run"))


@settings(max_examples=examples(10, 40))
@given(records=st.lists(epoch_records(), max_size=4))
def test_epochs_come_back_as_they_were_appended(tmp_path_factory: pytest.TempPathFactory, records: list[EpochRecord]) -> None:
    run, records = fresh(tmp_path_factory), numbered(records)
    for record in records:
        run.append(record)
    assert run.epochs() == records


@settings(max_examples=examples(10, 40))
@given(records=st.lists(epoch_records(), min_size=1, max_size=3), data=st.data())
def test_a_last_line_that_a_kill_cut_off_is_no_record(
    tmp_path_factory: pytest.TempPathFactory, records: list[EpochRecord], data: st.DataObject
) -> None:
    """However much of it was written: its end, the line break, is what makes it a record."""
    run, records = fresh(tmp_path_factory), numbered(records)
    for record in records:
        run.append(record)
    content = lines(run).read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    lines(run).write_bytes(content[: len(content) - data.draw(st.integers(1, last))])
    assert run.epochs() == records[:-1]


def test_a_damaged_line_in_the_middle_is_named_with_its_number(run: RunDirectory) -> None:
    for number in (1, 2, 3):
        run.append(make_epoch(number))
    content = lines(run).read_text(encoding="utf-8").split("\n")
    content[1] = content[1][:40]
    lines(run).write_text("\n".join(content), encoding="utf-8")
    with pytest.raises(RunError) as caught:
        run.epochs()
    assert f"{lines(run)}, line 2 is damaged" in str(caught.value)
    assert str(caught.value).endswith("; restore the file, or leave this run out")


@pytest.mark.parametrize("kept", [[1], [0, 2], [1, 0], [0, 0]])
def test_a_line_that_is_gone_or_elsewhere_is_told(run: RunDirectory, kept: list[int]) -> None:
    for number in (1, 2, 3):
        run.append(make_epoch(number))
    content = lines(run).read_text(encoding="utf-8").splitlines(keepends=True)
    lines(run).write_text("".join(content[index] for index in kept), encoding="utf-8")
    with pytest.raises(RunError, match=r"line [12] is of epoch [1-3]: lines are missing, or in another order; restore the file"):
        run.epochs()


def test_records_of_epochs_that_cannot_be_read_are_not_none(run: RunDirectory) -> None:
    lines(run).mkdir()
    with pytest.raises(RunError, match=r"epochs\.jsonl cannot be read: Is a directory"):
        run.epochs()


def table(**changes: Any) -> str:
    return json.dumps(asdict(make_epoch()) | changes)


DAMAGE = {
    "empty": b"",
    "no JSON": b"not JSON",
    "zeros": b"\0\0\0\0",
    "no UTF-8": b"\xff\xfe",
    "a number": b"3",
    "null": b"null",
    "a list": b"[1, 2]",
    "a string": b'"text"',
    "no keys": b"{}",
    "epoch is text": table(epoch="one").encode(),
    "unknown key": table(losss=1).encode(),
    "no training score": table(train=None).encode(),
    "half a score": table(train={"loss": 1.0}).encode(),
    "phases a number": table(phases=3).encode(),
    "a phase a number": table(phases=dict.fromkeys(PHASES, 1.0)).encode(),
    "no phases": table(phases={}).encode(),
    "phases of one rank": table(phases={name: [1.0] for name in PHASES}).encode(),
    "phases missing": table(phases={name: [1.0, 2.0] for name in COMPUTE}).encode(),
    "no ranks": table(wall=[]).encode(),
    "wall a number": table(wall=3.0).encode(),
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE.keys())
def test_any_damage_is_an_error_of_ours_with_the_line(run: RunDirectory, line: bytes) -> None:
    run.append(make_epoch(1))
    with lines(run).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunError, match=r"epochs\.jsonl, line 2"):
        run.epochs()


def test_phases_of_different_numbers_of_ranks_are_counted_in_the_message(run: RunDirectory) -> None:
    run.append(replace(make_epoch(), phases={name: [1.0, 2.0, 3.0] for name in PHASES}))
    with pytest.raises(RunError, match=r"line 1 has phases of different numbers of ranks: \[2, 3\]"):
        run.epochs()


def test_a_full_disk_ends_an_append_with_a_storage_error_and_loses_no_epoch(run: RunDirectory) -> None:
    """RLIMIT_FSIZE stands for a quota: the second record fits in part, and what was written before is still read."""
    run.append(make_epoch(1))
    size = lines(run).stat().st_size
    program = """
import resource, signal, sys
from pathlib import Path
from deepex.errors import StorageError
from deepex.record import EpochRecord, PHASES, RunDirectory, Score
run = RunDirectory.open(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    run.append(run.epochs()[0])
except StorageError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(run.path), str(size + 100)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"cannot write {lines(run)}: File too large" in done.stdout
    assert "raise the quota" in done.stdout
    assert lines(run).stat().st_size == size + 100
    assert run.epochs() == [make_epoch(1, finished=run.epochs()[0].finished)]


def test_an_append_after_a_cut_off_line_does_not_join_it(run: RunDirectory) -> None:
    """A run that is resumed forgets the cut-off line first; then appends stand on lines of their own."""
    run.append(make_epoch(1))
    with lines(run).open("a", encoding="utf-8") as file:
        file.write('{"epoch": 2, "sam')
    run.forget_after(1)
    run.append(make_epoch(2))
    assert [epoch.epoch for epoch in run.epochs()] == [1, 2]


@pytest.mark.parametrize("last", [0, 1, 2, 3, 9])
def test_forget_after_keeps_the_epochs_up_to_a_number(run: RunDirectory, last: int) -> None:
    records = [make_epoch(number, finished=f"2024-01-0{number}") for number in (1, 2, 3)]
    for record in records:
        run.append(record)
    run.forget_after(last)
    assert run.epochs() == records[:last]
    assert len(lines(run).read_text(encoding="utf-8").splitlines()) == min(last, 3)


def test_forget_after_in_a_new_run_is_harmless(run: RunDirectory) -> None:
    run.forget_after(0)
    assert run.epochs() == []


def test_forgetting_is_atomic(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        run.append(make_epoch(number))
    before = lines(run).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StorageError):
        run.forget_after(1)
    assert lines(run).read_bytes() == before


# What an epoch says


def test_phase_seconds_are_means_over_ranks() -> None:
    phases = {"input": [1.0, 3.0], "forward": [2.0, 4.0], "backward": [4.0, 8.0], "update": [0.5, 1.5], "sync": [0.0, 2.0]}
    epoch = make_epoch(phases=phases)
    assert epoch.phase_seconds("input") == 2.0
    assert epoch.phase_seconds("sync") == 1.0
    assert epoch.phase_seconds("compute") == 3.0 + 6.0 + 1.0  # TotalCompTime of the paper: forward, backward, update
    assert epoch.ranks == 2


def test_a_score_that_is_not_there_is_none() -> None:
    epoch = make_epoch(validation=None)
    assert epoch.score("train", "error") == 0.25
    assert epoch.score("train", "rmse") is None
    assert epoch.score("validation", "loss") is None
    assert make_epoch(validation=Score(loss=2.0, samples=5)).score("validation", "loss") == 2.0


# What was used from moment to moment


def test_resources_by_host(run: RunDirectory) -> None:
    assert run.resources() == {}
    (run.path / "resources-n1.jsonl").write_text('{"seconds": 0.2}\n{"seconds": 0.4}\n', encoding="utf-8")
    (run.path / "resources-n2.jsonl").write_text("", encoding="utf-8")
    assert run.resources() == {"n1": [{"seconds": 0.2}, {"seconds": 0.4}], "n2": []}


def test_resources_that_a_kill_cut_off(run: RunDirectory) -> None:
    path = run.path / "resources.jsonl"
    path.write_text('{"seconds": 0.2}\n{"seco', encoding="utf-8")
    assert run.resources() == {"": [{"seconds": 0.2}]}
    path.write_text('{"seconds": 0.2}\n{"seco\n{"seconds": 0.6}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"resources\.jsonl, line 2 is damaged"):
        run.resources()


def test_what_earlier_versions_wrote_is_read_as_it_would_be_written_now(tmp_path: Path) -> None:
    """They had the measures beside the loss, none of them in run.json, and called the task the objective."""
    run = RunDirectory.create(tmp_path / "run", {"net": "lenet", "objective": "classify"}, [], {})
    run.append(make_epoch(train=Score(loss=1.5, samples=100, measures={"error": 0.25}), validation=Score(loss=2.0, samples=5)))
    line = json.loads((run.path / "epochs.jsonl").read_text())
    for part in ("train", "validation"):
        line[part] = {"error": None, "rmse": None} | line[part] | line[part].pop("measures")
    (run.path / "epochs.jsonl").write_text(json.dumps(line) + "\n")
    (epoch,) = run.epochs()
    assert (epoch.train.measures, epoch.validation.measures) == ({"error": 0.25}, {})
    assert (epoch.score("train", "error"), epoch.score("validation", "error")) == (0.25, None)
    assert run.measures([epoch]) == [EARLIER["error"]]
    assert run.config == {"net": "lenet", "task": "classify"}


def test_a_run_says_what_it_is_judged_by(tmp_path: Path) -> None:
    declared = [Measure(name="iou", better="higher", unit="%"), Measure(name="rmse", form="root")]
    run = RunDirectory.create(tmp_path / "run", {}, [], {"measures": [asdict(measure) for measure in declared]})
    assert run.measures([]) == declared
    run.set_state(measures=[{"name": "iou", "better": "sideways"}])
    with pytest.raises(RunError, match="better"):
        run.measures([])
