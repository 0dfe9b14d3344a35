"""The study directory: a plan of runs that vary something, and what became of each.

    study/
      study.json           kind, recipe, settings, what is varied, the plan; status and why it ended
      runs/NAME/           a run directory for each training of the plan; `measurements.json` where something else is measured
      .lock                held by the process that runs the plan

    study = StudyDirectory.open(Path("studies/strong"))
    for planned, run in study.trained():
        planned.varied["ranks"], run.epochs()

Reading needs no torch and no MPI. A run of the plan is done when its own record says so: nothing is noted twice. A study may come
from somebody else: every key is checked, and the name of a run is never a path to somewhere else.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from deepex.errors import ConfigError, RunError
from deepex.record.files import read_json, storage_error, write_json
from deepex.record.run import RunDirectory, now
from deepex.record.table import from_table

SCHEMA: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9_.+=,-]{0,199}")
_MOST_RANKS: Final = 10_000_000
_MOST_WORDS: Final = 500  # characters of what was wrong: the value may be the whole file


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a plan: `varied` is what distinguishes it from the others, apart from its `repeat` (1, 2, …).

    `command` is what each of its `ranks` runs after `python -m`, without `--out`; `before`, if there is one, what a single process
    runs first, in the same way. `estimate_seconds` is what it was thought to take.
    """

    name: str
    varied: dict[str, Any]
    repeat: int
    ranks: int
    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    estimate_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What `study.json` holds."""

    schema: int
    kind: str
    plan: tuple[dict[str, Any], ...]
    recipe: str = ""
    settings: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    machine: tuple[dict[str, Any], ...] = ()
    started: str = ""
    status: Literal["planned", "running", "stopped", "failed", "finished"] = "planned"
    reason: str = ""


class StudyDirectory:
    """A study directory that exists. Make one with `create`, find one with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, plan: Sequence[PlannedRun], machine: object, **state: Any) -> Self:
        """Start a study directory; one that holds another study is refused. `state` has `kind`, `recipe`, `settings`, `options`."""
        if (path / "study.json").exists():
            raise RunError(f"{path} already holds a study; choose another --out, or continue it with the same command")
        _check_plan(plan)
        study = cls(path)
        try:
            (path / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(path, error) from error
        table = [asdict(planned) for planned in plan]
        write_json(
            path / "study.json",
            {"schema": SCHEMA, "status": "planned", "started": now(), **state, "machine": machine, "plan": table},
        )
        return study

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a study for reading or going on."""
        if not is_study(path):
            raise RunError(f"{path} is not a study directory (it has no study.json); give what `deepex study --out` wrote")
        study = cls(path)
        _ = study.plan
        return study

    @property
    def state(self) -> dict[str, Any]:
        """What `study.json` says; every key has been checked, but for those of the plan."""
        path = self.path / "study.json"
        state = read_json(path, finite=True)
        if not isinstance(state, dict):
            raise RunError(f"{path} holds {type(state).__name__}, not a table; restore it or start a new study")
        if state.get("schema") != SCHEMA:
            schema = _shorten(repr(state.get("schema")))
            raise RunError(f"{self.path} has schema {schema}, this DeepEx reads {SCHEMA}; use the version that wrote it")
        try:
            from_table(_Content, state)
        except ConfigError as error:
            raise _damaged(path, error) from error
        return state

    def set_state(self, **changes: object) -> None:
        """Change keys of `study.json`."""
        write_json(self.path / "study.json", {**self.state, **changes})

    @property
    def kind(self) -> str:
        """What the study varies: `strong`, `weak`, …."""
        return str(self.state.get("kind"))

    @property
    def plan(self) -> tuple[PlannedRun, ...]:
        """The runs, in the order in which they run."""
        tables = self.state["plan"]
        try:
            plan = tuple(from_table(PlannedRun, table, f"plan.{number}.") for number, table in enumerate(tables))
            _check_plan(plan)
        except ConfigError as error:
            raise _damaged(self.path / "study.json", error) from error
        return plan

    def run_path(self, planned: PlannedRun) -> Path:
        """Where a run of the plan writes."""
        return self.path / "runs" / planned.name

    def status(self, planned: PlannedRun) -> str:
        """What became of a run: `finished`, `failed`, `stopped`, `running`, or `open` if it has not begun."""
        path = self.run_path(planned)
        if (path / "measurements.json").is_file():
            return "finished"
        if (path / "run.json").is_file():
            return str(RunDirectory(path).state.get("status"))
        return "failed" if (path / "failure.json").is_file() else "open"

    def reason(self, planned: PlannedRun) -> str:
        """Why a run ended."""
        path = self.run_path(planned)
        for name in ("failure.json", "run.json"):
            if (path / name).is_file():
                state = read_json(path / name)
                return str(state.get("reason", "")) if isinstance(state, dict) else ""
        return ""

    def trained(self) -> Iterator[tuple[PlannedRun, RunDirectory]]:
        """The trainings of the plan that have finished."""
        for planned in self.plan:
            path = self.run_path(planned)
            if (path / "run.json").is_file() and self.status(planned) == "finished":
                yield planned, RunDirectory.open(path)

    def measured(self) -> Iterator[tuple[PlannedRun, list[dict[str, Any]]]]:
        """The measurements of the plan that have finished."""
        for planned in self.plan:
            path = self.run_path(planned) / "measurements.json"
            if path.is_file():
                yield planned, read_json(path)


def is_study(path: Path) -> bool:
    """Whether a directory holds a study."""
    return (path / "study.json").is_file()


def _check_plan(plan: Sequence[PlannedRun]) -> None:
    names: dict[str, int] = {}
    for number, planned in enumerate(plan):
        where = f"plan.{number}."
        _check_planned(planned, where)
        _check_varied(planned.varied, f"{where}varied")
        if planned.name in names:
            raise ConfigError(
                f"key '{where}name' is {planned.name!r}, as key 'plan.{names[planned.name]}.name' is; each run needs its own"
            )
        names[planned.name] = number


def _check_planned(planned: PlannedRun, where: str) -> None:
    if not _NAME.fullmatch(planned.name):
        raise ConfigError(
            f"key '{where}name' is {planned.name!r}; it must be a name for a directory: letters, digits and _.+=,- alone, at most "
            "200 of them, the first no dot"
        )
    if not 1 <= planned.ranks <= _MOST_RANKS:
        raise ConfigError(f"key '{where}ranks' is {planned.ranks}; it must be from 1 to {_MOST_RANKS}")
    if planned.repeat < 1:
        raise ConfigError(f"key '{where}repeat' is {planned.repeat}; it must be at least 1")
    if not planned.command:
        raise ConfigError(f"key '{where}command' is empty; it must be what is run: a program and its arguments")
    if planned.estimate_seconds is not None and not 0 <= planned.estimate_seconds < math.inf:
        raise ConfigError(f"key '{where}estimate_seconds' is {planned.estimate_seconds}; it must be a number of seconds from 0 up")


def _check_varied(varied: Mapping[str, Any], where: str) -> None:
    for key, value in varied.items():
        if not isinstance(value, str | int | float):
            raise ConfigError(f"key '{where}.{key}' is {value!r}; it must be a text, a number, true or false")


def _damaged(path: Path, error: ConfigError) -> RunError:
    return RunError(f"{path} is damaged: {_shorten(str(error))}; restore it or start a new study")


def _shorten(text: str) -> str:
    """The beginning and the end: a value in a message may be the whole file."""
    half = _MOST_WORDS // 2
    return text if len(text) <= _MOST_WORDS else f"{text[:half]} … {text[-half:]}"
