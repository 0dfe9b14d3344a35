"""Directories to runs and studies, each file read once.

    collection = collect([Path("studies/strong"), Path("runs")])
    collection.runs, collection.studies, collection.problems

A directory may be a run, a study, or a folder that holds some, one or two levels down. A record that is damaged is not passed over
in silence: it is among the problems, with the file and the reason, and stands in the report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from deepex.errors import DeepexError, RunError
from deepex.record import EpochRecord, PlannedRun, RunDirectory, StudyDirectory, is_study
from deepex.record.files import read_json
from deepex.record.measure import Measure
from deepex.record.schema import Measurement, PageCache, checked
from deepex.speedup.statistics import steady

_LEVELS: Final = 2


@dataclass(frozen=True)
class Problem:
    """A run that failed, has not finished or cannot be read, and why."""

    name: str
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory in memory. `varied` is what its study varies, empty for a run on its own.

    `page_cache`: what a study of storage noted of its files before the run.
    """

    name: str
    state: dict[str, Any]
    config: dict[str, Any]
    machines: list[dict[str, Any]]
    epochs: list[EpochRecord]
    measures: list[Measure]
    varied: dict[str, Any] = field(default_factory=dict)
    page_cache: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """On how many ranks the run ended."""
        return self.epochs[-1].ranks

    @property
    def status(self) -> str:
        """`finished`, `running`, `stopped`, `failed` or `killed`."""
        return str(self.state.get("status"))

    @cached_property
    def steady(self) -> list[EpochRecord]:
        """The epochs whose times count."""
        return steady(self.epochs)

    @property
    def usable(self) -> bool:
        """Whether the run has an epoch that can be counted, and has not failed."""
        return self.status != "failed" and any(not epoch.partial and epoch.ranks == self.ranks for epoch in self.epochs)

    @property
    def has_phases(self) -> bool:
        """False for a peer, whose record has times of whole epochs alone."""
        return self.steady[-1].has_phases

    @property
    def shared_cores(self) -> int | None:
        """How many cores a node has for its ranks, where they computed on more threads than that."""
        if self.state.get("device") != "cpu":
            return None
        for machine in self.machines:
            cores, ranks = (machine.get("cpu") or {}).get("num_cores_usable"), machine.get("ranks")
            here = len(ranks) if isinstance(ranks, list) else self.ranks
            if isinstance(cores, int) and here * int(self.state.get("threads") or 1) > cores:
                return cores
        return None

    @property
    def measured(self) -> bool:
        """Whether no epoch was predicted."""
        return all(epoch.measured for epoch in self.epochs)

    @property
    def measure(self) -> Measure:
        """What the run is judged by above all."""
        return self.measures[0]


@dataclass(kw_only=True)
class Study:
    """One study directory in memory: its runs with what each varies, and tables of what was measured otherwise."""

    name: str
    state: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What the study varies."""
        return str(self.state.get("kind"))


@dataclass(kw_only=True)
class Collection:
    """All that goes into a report."""

    runs: list[Run] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def all_runs(self) -> list[Run]:
        """The runs on their own and those of studies."""
        return [*self.runs, *(run for study in self.studies for run in study.runs)]


def collect(directories: Sequence[Path]) -> Collection:
    """Read every run and study in `directories`; one that is given twice, or also lies in another, counts once."""
    collection = Collection()
    seen: set[Path] = set()
    for directory in directories:
        found = [path for path in _find(directory) if path.resolve() not in seen]
        for path in found:
            seen.add(path.resolve())
            _read(path, _name(path, directory), collection)
    if not any((collection.runs, *(study.runs or study.measurements for study in collection.studies))):
        why = "; ".join(f"{problem.name}: {problem.reason or problem.status}" for problem in collection.problems[:3])
        raise RunError(
            f"nothing to report in {', '.join(map(str, directories))}: what failed or has no whole epoch is left out"
            f"{' (' + why + ')' if why else ''}; give directories of `deepex train --out` or `deepex study --out` that have begun"
        )
    return collection


def _find(directory: Path) -> list[Path]:
    found = list(_search(directory, _LEVELS))
    if not found:
        what = "does not exist" if not directory.exists() else "holds no run.json or study.json, nor do the folders in it"
        raise RunError(
            f"{directory} {what}; give run or study directories, as `deepex train --out` and `deepex study --out` write them"
        )
    return found


def _search(directory: Path, levels: int) -> Iterator[Path]:
    if is_study(directory) or (directory / "run.json").is_file():
        yield directory
    elif levels and directory.is_dir():
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield from _search(path, levels - 1)


def _name(path: Path, given: Path) -> str:
    return path.resolve().name if path == given else str(path.relative_to(given))


def _read(path: Path, name: str, collection: Collection) -> None:
    try:
        if is_study(path):
            collection.studies.append(_read_study(path, name, collection.problems))
        elif (run := _read_run(path, name, {}, collection.problems)) is not None:
            collection.runs.append(run)
    except DeepexError as error:
        collection.problems.append(Problem(name, "unreadable", str(error)))


def _read_study(path: Path, name: str, problems: list[Problem]) -> Study:
    directory = StudyDirectory.open(path)
    study = Study(name=name, state=directory.state)
    for planned in directory.plan:
        try:
            _read_planned(study, directory, planned, f"{name}/{planned.name}", problems)
        except DeepexError as error:
            problems.append(Problem(f"{name}/{planned.name}", "unreadable", str(error)))
    return study


def _read_planned(study: Study, directory: StudyDirectory, planned: PlannedRun, name: str, problems: list[Problem]) -> None:
    path = directory.run_path(planned)
    if (path / "measurements.json").is_file():
        measured = path / "measurements.json"
        study.measurements += checked(list[Measurement], read_json(measured), measured)
    elif (path / "run.json").is_file():
        run = _read_run(path, name, planned.varied, problems)
        study.runs += [run] if run is not None else []
    elif (path / "failure.json").is_file():
        problems.append(Problem(name, "failed", directory.reason(planned)))
    else:
        problems.append(Problem(name, "open", "planned, not begun"))


def _read_run(path: Path, name: str, varied: dict[str, Any], problems: list[Problem]) -> Run | None:
    directory = RunDirectory.open(path)
    cache, state, epochs = path / "page_cache.json", directory.state, directory.epochs()
    state["status"], state["reason"] = directory.outcome
    run = Run(
        name=name,
        state=state,
        config=directory.config,
        machines=directory.machine,
        epochs=epochs,
        measures=directory.measures(epochs),
        varied=varied,
        page_cache=checked(PageCache, read_json(cache), cache) if cache.is_file() else {},
    )
    usable = bool(run.epochs) and run.usable
    if run.status != "finished" or not usable:
        counted = f"; its {len(run.epochs)} epoch(s) are counted" if usable else "; it is in no figure"
        problems.append(Problem(name, run.status, f"{run.state.get('reason') or 'no reason is noted'}{counted}"))
    return run if usable else None
