"""On what, and with what configuration: hosts, processors, versions; what differs between runs is marked.

machine_section(runs, experiments)
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from deepex.report.collect import Run
from deepex.report.experiment import Experiment, flatten, gpus_of
from deepex.report.figure import Section, Table
from deepex.report.words import count, listed, size, value_text

_MOST_HOSTS: Final = 20
_MOST_VALUES: Final = 8


def machine_section(runs: Sequence[Run], experiments: Sequence[Experiment]) -> Section:
    """Hosts; what differs between runs, experiment by experiment; what all share."""
    hosts = Counter(json.dumps(_host(machine)) for run in runs for machine in run.machines)
    rows = [[*json.loads(text), many] for text, many in hosts.most_common(_MOST_HOSTS)]
    columns = ["host", "processor", "GPUs", "memory", "system", "versions", "commit", "runs"]
    tables = [Table(title="Machines", columns=columns, rows=rows)]
    more = [f"{len(hosts) - _MOST_HOSTS:,} more hosts are not listed."] if len(hosts) > _MOST_HOSTS else []
    trained = [experiment for experiment in experiments if experiment.runs]
    lead = [_machines_text(rows), *more] if rows else []
    return Section(title="Machine and configuration", lead=lead, tables=[*tables, *_configuration(trained)])


def _machines_text(rows: Sequence[Sequence[Any]]) -> str:
    processors = sorted({str(row[2] if row[2] != "none" else row[1]) for row in rows})
    return f"The runs used {count(len({row[0] for row in rows}), 'host')} with {listed(processors)}."


def _host(machine: dict[str, Any]) -> list[str]:
    cpu, memory, system = (machine.get(name) or {} for name in ("cpu", "memory", "system"))
    gpus = Counter(str(gpu.get("name", "GPU")) for gpu in gpus_of(machine))
    versions = {name: value for name, value in (machine.get("versions") or {}).items() if value}
    return [
        str(machine.get("host")),
        f"{cpu.get('model') or cpu.get('architecture') or 'unknown'}, {cpu.get('num_cores_usable', '?')} cores",
        ", ".join(f"{many} × {name}" for name, many in gpus.items()) or "none",
        size(total) if isinstance(total := memory.get("total_bytes"), int | float) else "unknown",
        " ".join(str(system[key]) for key in ("distribution", "architecture") if system.get(key)),
        ", ".join(f"{name} {value}" for name, value in versions.items()),
        str(machine.get("commit") or "unknown")[:12],
    ]


def _configuration(experiments: Sequence[Experiment]) -> list[Table]:
    """A key that is the same in every run is in the second table, any other in the first."""
    flat = [[{"ranks": run.ranks, **flatten(run.config)} for run in experiment.runs] for experiment in experiments]
    everything = [table for tables in flat for table in tables]
    differing: list[list[str]] = []
    common: list[list[str]] = []
    for key in dict.fromkeys(key for table in everything for key in table):
        values = _values(everything, key)
        if len(values) == 1:
            common.append([key, next(iter(values))])
        else:
            differing += [[key, one.name, _counted(_values(tables, key))] for one, tables in zip(experiments, flat, strict=True)]
    if len(experiments) == 1:
        differing = [[key, text] for key, _, text in differing]
    shared = Table(title="Configuration that all runs share", columns=["key", "value"], rows=common, folded=True)
    if not differing:
        return [shared]
    marked = frozenset(at for at, row in enumerate(differing) if len(experiments) == 1 or " run" in row[-1])
    columns = ["key", "values"] if len(experiments) == 1 else ["key", "in", "values"]
    title = f"What differs between {count(len(everything), 'run')}"
    return [Table(title=title, columns=columns, rows=differing, marked=marked, folded=len(differing) > 24), shared]


def _values(tables: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    return Counter(value_text(table[key]) if key in table else "not set" for table in tables)


def _counted(values: Counter[str]) -> str:
    """`1 (3 runs) and 2 (3 runs)`; a value that all have stands alone."""
    if len(values) == 1:
        return next(iter(values))
    return listed((f"{value} ({count(many, 'run')})" for value, many in values.most_common()), _MOST_VALUES)
