"""The study directory: a plan of runs that vary something, and what became of each.

    study/
      study.json           kind, recipe, settings, what is varied, the plan; status and why it ended
      runs/NAME/           a run directory for each training of the plan; `measurements.json` where something else is measured
      .lock                held by the process that runs the plan

    study = StudyDirectory.open(Path("studies/strong"))
    for planned, run in study.trained():
        planned.varied["ranks"], run.epochs()

Reading needs no torch and no MPI. A run of the plan is done when its own record says so: nothing is noted twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from deepex.errors import ConfigError, RunError
from deepex.record.files import read_json, storage_error, write_json
from deepex.record.run import RunDirectory, now
from deepex.record.table import from_table

SCHEMA: Final = 1


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


class StudyDirectory:
    """A study directory that exists. Make one with `create`, find one with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, plan: Sequence[PlannedRun], machine: object, **state: Any) -> Self:
        """Start a study directory; one that holds another study is refused. `state` has `kind`, `recipe`, `settings`, `options`."""
        if (path / "study.json").exists():
            raise RunError(f"{path} already holds a study; choose another --out, or continue it with the same command")
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
        if study.state.get("schema") != SCHEMA:
            raise RunError(
                f"{path} has schema {study.state.get('schema')!r}, this DeepEx reads {SCHEMA}; use the version that wrote it"
            )
        return study

    @property
    def state(self) -> dict[str, Any]:
        """What `study.json` says."""
        state = read_json(self.path / "study.json")
        if not isinstance(state, dict):
            raise RunError(f"{self.path / 'study.json'} holds {type(state).__name__}, not a table; restore it or start a new study")
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
        try:
            return tuple(from_table(PlannedRun, table) for table in self.state["plan"])
        except (KeyError, TypeError, ConfigError) as error:
            raise RunError(f"{self.path / 'study.json'} has a damaged plan: {error}; restore it or start a new study") from error

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
                return str(read_json(path / name).get("reason", ""))
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
