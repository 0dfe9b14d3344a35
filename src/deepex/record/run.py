"""The run directory: the one format that training writes and everything else reads.

    run/
      config.toml        every key; `deepex train run/config.toml` repeats the run
      machine.json       hardware, versions and ranks of each node
      run.json           status, why it ended, and what was chosen (ranks, replicas, communicator, placement …) with reasons
      epochs.jsonl       one line per epoch: see EpochRecord
      resources.jsonl    what was used from moment to moment (resources-HOST.jsonl where there are several nodes)
      checkpoints/       *.safetensors with their *.json; the .json is written last and makes the checkpoint whole
      weights.safetensors  the trained network, as plain named tensors, when the run has ended
      .lock              held by the process that writes here

    run = RunDirectory.open(Path("runs/a"))
    [epoch.loss for epoch in run.epochs()]

Reading needs no torch and no MPI.
"""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from time import sleep
from typing import Any, Final, Self

from deepex.errors import RunError
from deepex.record.clock import COMPUTE, PHASES
from deepex.record.files import read_json, read_lines, storage_error, write_json, write_text
from deepex.record.measure import EARLIER, LOSS, Measure
from deepex.record.rule import Amount, Amounts, Count, Seconds, Shares, Times
from deepex.record.schema import REMEDY, Config, Machine, RunState, checked, checked_line, read_moments
from deepex.record.table import dump_toml, load_toml

SCHEMA: Final = 1
_LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the network did over some samples: the loss, and by name the measures that the run declares."""

    loss: float
    samples: Count
    measures: dict[str, float] = field(default_factory=dict)
    seconds: Amount | None = None

    def get(self, measure: str) -> float | None:
        """The loss, or a measure; None if it is not there."""
        return self.loss if measure == LOSS.name else self.measures.get(measure)


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch. `seconds` is its wall time on the slowest rank, without validation; `phases` has every rank's in each phase.

    `partial` marks an epoch whose times do not cover the whole of it, because the run was resumed in its middle.
    `measured` is false for a predicted epoch. `period` says why its syncs were where they were. `drift` is how far a replica was
    from the mean when they met, for each group of layers and for all of them, as a share of the mean's norm; `moved` is how far the
    mean itself had come since the sync before. `lost` is how often a replica was left out of a sync, having gone astray.
    `usage` has what each rank used in each phase and in `other` (validation, checkpoints): `usage["cpu_seconds"]["forward"][rank]`;
    what could not be measured is not there, and what cannot be told by phase is all in `epoch`. `opens` and `data_bytes` are of the
    files of samples (data/feeds/read_counter.py).
    """

    epoch: Count
    samples: Count
    steps: Count
    syncs: Count
    rate: Amount
    train: Score
    seconds: Seconds
    phases: dict[str, Amounts]
    wall: Times
    validation: Score | None = None
    partial: bool = False
    measured: bool = True
    period: str = ""
    drift: Shares = field(default_factory=dict)
    moved: Shares = field(default_factory=dict)
    lost: Count = 0
    usage: dict[str, dict[str, Amounts]] = field(default_factory=dict)
    finished: str = field(default_factory=lambda: now())  # noqa: PLW0108 - it is defined further down

    def phase_seconds(self, phase: str) -> float:
        """Mean over ranks of the seconds in `phase`; `compute` is forward, backward and update together."""
        names = COMPUTE if phase == "compute" else (phase,)
        return sum(sum(self.phases[name]) / len(self.phases[name]) for name in names)

    @property
    def has_phases(self) -> bool:
        """False for an epoch of which the time as a whole is known alone, as of another framework."""
        return any(any(values) for values in self.phases.values())

    @property
    def ranks(self) -> int:
        """How many ranks the epoch ran on."""
        return len(self.wall)

    def score(self, part: str, measure: str) -> float | None:
        """Look up the loss or a measure of `train` or `validation`."""
        score = self.train if part == "train" else self.validation
        return None if score is None else score.get(measure)


class RunDirectory:
    """A run directory that exists. Make one with `create`, find one with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], machine: object, state: dict[str, Any]) -> Self:
        """Start a run directory; one that already holds a run is refused, so that no run is lost."""
        refuse_existing_run(path)
        run = cls(path)
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(path, error) from error
        write_text(path / "config.toml", dump_toml(config))
        write_json(path / "machine.json", machine)
        run.set_state(schema=SCHEMA, id=token_hex(8), status="running", started=now(), **state)
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a run for reading or resuming."""
        if not (path / "run.json").is_file():
            what = "does not exist" if not path.exists() else "has no run.json"
            raise RunError(f"{path} is not a run directory: it {what}; give the directory that `deepex train --out` wrote")
        run = cls(path)
        schema = run.state.get("schema")
        if schema != SCHEMA:
            raise RunError(f"{path} has schema {schema!r}, this DeepEx reads {SCHEMA}; use the version that wrote it")
        return run

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration as a table."""
        path = self.path / "config.toml"
        if not path.is_file():
            raise RunError(f"{path} is missing; restore it or start a new run")
        table = load_toml(path)
        if "objective" in table:  # as the key was called in earlier runs
            table = {"task" if key == "objective" else key: value for key, value in table.items()}
        config: dict[str, Any] = checked(Config, table, path)
        return config

    @property
    def machine(self) -> list[dict[str, Any]]:
        """Hardware and versions of each node."""
        path = self.path / "machine.json"
        machines: list[dict[str, Any]] = checked(list[Machine], read_json(path, finite=True), path)
        return machines

    @property
    def state(self) -> dict[str, Any]:
        """What `run.json` says."""
        path = self.path / "run.json"
        state: dict[str, Any] = checked(RunState, read_json(path, finite=True), path)
        return state

    def measures(self, epochs: Sequence[EpochRecord]) -> list[Measure]:
        """What the run is judged by, the first above all; of a run that does not say so, what is in its records."""
        if declared := self.state.get("measures"):
            path = self.path / "run.json"
            found: list[Measure] = checked(list[Measure], declared, path)
            return found
        return [EARLIER.get(name, Measure(name=name)) for name in (epochs[-1].train.measures if epochs else {})] or [LOSS]

    @property
    def id(self) -> str:
        """What tells the run from others, wherever its directory is moved to; empty for one that was begun before there was any."""
        return str(self.state.get("id", ""))

    @property
    def outcome(self) -> tuple[str, str]:
        """The status and the reason, for people: a run that says `running`, and that nobody writes any more, was `killed`.

        Where the lock cannot tell, because it is missing, of another host or on a file system without locks, it is as it says.
        """
        state = self.state
        if state.get("status") == "running" and _is_free(self.path) and _was_here(self.path):
            state = self.state  # it may have ended in between
            if state.get("status") == "running":
                remedy = "begin it anew" if "framework" in state else f"go on with `deepex train --resume {self.path}`"
                return "killed", f"its process ended without a word; {remedy}"
        return str(state["status"]), str(state.get("reason") or "")

    def set_state(self, **changes: object) -> None:
        """Change keys of `run.json`."""
        before = self.state if (self.path / "run.json").is_file() else {}
        write_json(self.path / "run.json", {**before, **changes})

    def set_failed(self, reason: str, rank: int) -> None:
        """Note in `run.json` why the run failed. Several ranks may at once: each writes a file of its own and moves it there."""
        own = self.path / f".run-rank{rank}.json"
        write_json(own, {**self.state, "status": "failed", "reason": reason})
        own.replace(self.path / "run.json")

    def append(self, epoch: EpochRecord) -> None:
        """Add one line to the record and force it to the disk."""
        path = self.path / "epochs.jsonl"
        line = json.dumps(asdict(epoch)) + "\n"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(path, error) from error

    def epochs(self) -> list[EpochRecord]:
        """Every epoch that was written whole. A last line without its end was cut off by a kill and is no record."""
        path = self.path / "epochs.jsonl"
        if not path.exists():
            return []
        return [_epoch(path, number, table) for number, table in enumerate(read_lines(path, remedy=REMEDY), start=1)]

    def resources(self) -> dict[str, list[dict[str, float]]]:
        """What each node's first rank saw from moment to moment, by host; a run on one node has the host "".

        What could not be read is not there.
        """
        paths = sorted(self.path.glob("resources*.jsonl"))
        return {path.stem.removeprefix("resources").removeprefix("-"): read_moments(path) for path in paths}

    def forget_after(self, last: int) -> None:
        """Drop the epochs after number `last` (and a cut-off line): a resumed run will write them again."""
        kept = [json.dumps(asdict(epoch)) + "\n" for epoch in self.epochs() if epoch.epoch <= last]
        write_text(self.path / "epochs.jsonl", "".join(kept))


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep every other process from writing a run in `path` meanwhile; the system lets go when this one ends, however it does.

    Where the file system has no locks, nobody is kept out.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        _lock(path, descriptor)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process writes a run in `path` now."""
    return _is_free(path) is False


def _is_free(path: Path) -> bool | None:
    """Whether nobody holds the lock of `path`; None where there is none, or the file system cannot tell."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return True


def _was_here(path: Path) -> bool:
    """Whether a process on this host was the last to hold the lock: that of another host need not be seen from here."""
    try:
        holder = (path / ".lock").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.fullmatch(rf"process \d+ on {re.escape(socket.gethostname())}", holder) is not None


def _lock(path: Path, descriptor: int) -> None:
    try:
        _lock_alone(descriptor)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        raise RunError(
            f"{path} is being written by {holder}: wait until it has ended; if its machine is gone, delete {path / '.lock'}"
        ) from None
    except OSError:
        return
    with suppress(OSError):  # a full disk: the lock holds, though it tells no name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _lock_alone(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sleep(_LOOK_SECONDS)  # somebody may just look whether the lock is free
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def refuse_existing_run(path: Path) -> None:
    """Raise if `path` already holds a run."""
    if (path / "run.json").exists():
        raise RunError(f"{path} already holds a run; choose another --out, or continue it with --resume {path}")


def now() -> str:
    """Give the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _with_measures(table: object) -> object:
    """A line in which an earlier version wrote measures beside the loss, as it is written now."""
    if not isinstance(table, dict):
        return table
    scores = {part: score for part in ("train", "validation") if isinstance(score := table.get(part), dict)}
    for part, score in scores.items():
        if found := {name: score[name] for name in EARLIER if name in score}:
            rest = {key: value for key, value in score.items() if key not in EARLIER}
            table = {**table, part: {**rest, "measures": {name: value for name, value in found.items() if value is not None}}}
    return table


def _epoch(path: Path, number: int, table: object) -> EpochRecord:
    epoch: EpochRecord = checked_line(EpochRecord, _with_measures(table), path, number, REMEDY)
    if epoch.epoch != number:
        raise RunError(f"{path}, line {number} is of epoch {epoch.epoch}: lines are missing, or in another order; {REMEDY}")
    lengths = {len(epoch.phases.get(name, [])) for name in PHASES} | {len(epoch.wall)}
    if lengths != {len(epoch.wall)}:
        raise RunError(f"{path}, line {number} has phases of different numbers of ranks: {sorted(lengths)}; {REMEDY}")
    return epoch
