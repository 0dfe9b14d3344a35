"""Runs that belong together, in groups that differ in something other than chance.

    for experiment in experiments(collection):
        experiment.kind, [(group.label, group.seconds) for group in experiment.groups]

A study says itself what it varies. Runs on their own are put together by network and dataset, and what differs between their
configurations is what they vary, ranks before all; the seed is chance.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from deepex.record import Target
from deepex.record.measure import Measure
from deepex.report.collect import Collection, Run, Study
from deepex.report.words import count, value_text
from deepex.speedup.target import common_target

# What may differ between repeats: chance, what is done with the result, and how long.
_CHANCE: Final = {"seed", "replicas", "epochs", "target", "verify", "comm", "net", "data", "task"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ by chance alone."""

    varied: dict[str, Any]
    runs: list[Run]

    @property
    def ranks(self) -> int:
        """How many ranks the runs had."""
        return self.runs[0].ranks

    @property
    def label(self) -> str:
        """What is varied, in words."""
        return label(self.varied)

    @cached_property
    def seconds(self) -> list[list[float]]:
        """Seconds of steady epochs, by repeat."""
        return [[epoch.seconds for epoch in run.steady] for run in self.runs]

    @property
    def measured(self) -> bool:
        """Whether no time was predicted."""
        return all(run.measured for run in self.runs)

    @property
    def sharing(self) -> str:
        """` (sharing 2 cores)` where ranks did, which no speedup survives; else nothing."""
        cores = next((found for run in self.runs if (found := run.shared_cores) is not None), None)
        return f" (sharing {count(cores, 'core')})" if cores else ""

    def seconds_to(self, target: Target) -> list[list[float]] | None:
        """Seconds to a target, t · N, for each steady epoch by repeat; None unless every repeat reached it."""
        reached = [target.epochs(run.epochs) for run in self.runs]
        if any(epochs is None for epochs in reached):
            return None
        return [[value * (epochs or 0) for value in values] for values, epochs in zip(self.seconds, reached, strict=True)]

    def epochs_to(self, target: Target) -> list[int | None]:
        """Epochs to a target, by repeat."""
        return [target.epochs(run.epochs) for run in self.runs]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Groups to compare. `kind` is a study's, or for runs on their own `strong`, `settings` or `runs`."""

    kind: str
    name: str
    title: str
    groups: list[Group]
    targets: list[Target] = field(default_factory=list)
    afterwards: bool = False  # whether the target was chosen from the runs themselves
    measurements: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def measure(self) -> Measure:
        """What its runs are judged by."""
        return self.runs[0].measure

    def ladders(self) -> dict[str, list[Group]]:
        """Groups that differ in ranks alone, each from few ranks to many; only where there are at least two."""
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            rest = {key: value for key, value in group.varied.items() if key != "ranks"}
            found.setdefault(label(rest), []).append(group)
        ordered = {name: sorted(rungs, key=lambda group: group.ranks) for name, rungs in found.items()}
        return {name: rungs for name, rungs in ordered.items() if len({group.ranks for group in rungs}) > 1}


def experiments(collection: Collection) -> list[Experiment]:
    """Studies first, in the order given; then runs on their own."""
    of_studies = [_of_study(study) for study in collection.studies if study.runs or study.measurements]
    apart: dict[str, list[Run]] = {}
    for run in collection.runs:
        apart.setdefault(_subject(run), []).append(run)
    return of_studies + [_of_runs(subject, runs) for subject, runs in apart.items()]


def label(varied: Mapping[str, Any]) -> str:
    """`4 ranks, sync.period 16`."""
    told = {key: value for key, value in varied.items() if value != ""}
    parts = [f"{value} rank{'' if value == 1 else 's'}" if key == "ranks" else _pair(key, value) for key, value in told.items()]
    return ", ".join(parts)


def _pair(key: str, value: Any) -> str:
    if key in ("threads", "samples") and isinstance(value, int):
        return f"{value:,} {key[:-1] if value == 1 else key}"
    if key == "onednn":
        return "oneDNN" if value else "no oneDNN"
    return (
        value_text(value)
        if key in ("framework", "placement", "format", "directory", "layout", "strategy")
        else f"{key} {value_text(value)}"
    )


def _of_study(study: Study) -> Experiment:
    chance = ("seed",) if study.kind == "variability" else ()
    runs = [(run, {key: value for key, value in run.varied.items() if key not in chance}) for run in study.runs]
    groups, targets = _groups(runs), _targets(study.state.get("targets"), study.runs)
    common = None
    if not targets and len(groups) > 1:
        common = common_target([[run.epochs for run in group.runs] for group in groups], groups[0].runs[0].measure)
    return Experiment(
        kind=study.kind,
        name=study.name,
        title=str(study.state.get("recipe") or ""),
        groups=groups,
        targets=[Target.parse(common)] if common else targets,
        afterwards=common is not None,
        measurements=study.measurements,
    )


def _of_runs(subject: str, runs: list[Run]) -> Experiment:
    flat = [_settings(run) for run in runs]
    keys = [key for key in dict.fromkeys(key for table in flat for key in table) if len({_key(t.get(key)) for t in flat}) > 1]
    varied = [(run, {key: table[key] for key in keys if key in table}) for run, table in zip(runs, flat, strict=True)]
    kind = {(): "runs", ("ranks",): "strong", ("framework",): "frameworks"}.get(tuple(keys), "settings")
    return Experiment(kind=kind, name=subject, title=subject, groups=_groups(varied), targets=_targets(None, runs))


def _groups(runs: Iterable[tuple[Run, dict[str, Any]]]) -> list[Group]:
    found: dict[str, Group] = {}
    for run, varied in runs:
        found.setdefault(_key(varied), Group(varied=varied, runs=[])).runs.append(run)
    return list(found.values())


def _targets(texts: Any, runs: Sequence[Run]) -> list[Target]:
    own = [run.config.get("target") for run in runs]
    chosen = texts if isinstance(texts, list) and texts else own
    return [Target.parse(text) for text in dict.fromkeys(str(text) for text in chosen if text)]


def _subject(run: Run) -> str:
    data = (run.state.get("dataset") or {}).get("name") or run.config.get("data", "?")
    return f"{run.config.get('net', '?')} on {data}"


def _settings(run: Run) -> dict[str, Any]:
    """All that may make a difference: ranks, replicas if they are not the ranks, machine, configuration."""
    table: dict[str, Any] = {"ranks": run.ranks}
    replicas = run.state.get("replicas", run.ranks)
    table["replicas"] = "as ranks" if replicas == run.ranks else replicas
    table["framework"] = (run.state.get("framework") or {}).get("name", "deepex")
    flat = flatten({key: value for key, value in run.config.items() if key not in _CHANCE and key != "checkpoint"})
    return table | flat | {"processor": _processor(run)}


def _processor(run: Run) -> str:
    machine = run.machines[0] if run.machines else {}
    gpus = [str(gpu.get("name")) for gpu in gpus_of(machine)]
    return ", ".join(gpus) or str((machine.get("cpu") or {}).get("model"))


def gpus_of(machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs of a description, as far as it has any."""
    found = machine.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots, as `--set` takes them."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
