"""On what, and with what configuration: hosts, processors, versions; what differs between runs is marked.

machine_section(runs, experiments)
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepex.report.collect import Run
from deepex.report.experiment import Experiment, flatten
from deepex.report.figure import Section, Table
from deepex.report.words import count, listed, size, value_text

_MOST_HOSTS = 20
_MOST_VALUES = 6


def machine_section(runs: Sequence[Run], experiments: Sequence[Experiment]) -> Section:
    """Hosts in one table; for each experiment one of the configuration."""
    hosts = Counter(json.dumps(_host(machine)) for run in runs for machine in run.machines)
    rows = [[*json.loads(text), many] for text, many in hosts.most_common(_MOST_HOSTS)]
    tables = [
        Table(title="Machines", columns=["host", "processor", "GPUs", "memory", "system", "versions", "commit", "runs"], rows=rows)
    ]
    more = [f"{len(hosts) - _MOST_HOSTS:,} more hosts are not listed."] if len(hosts) > _MOST_HOSTS else []
    tables += [table for experiment in experiments if experiment.runs for table in _configuration(experiment, len(experiments) > 1)]
    return Section(title="Machine and configuration", lead=[_machines_text(rows), *more] if rows else [], tables=tables)


def _machines_text(rows: Sequence[Sequence[Any]]) -> str:
    processors = sorted({str(row[2] if row[2] != "none" else row[1]) for row in rows})
    return f"The runs used {count(len({row[0] for row in rows}), 'host')} with {listed(processors)}."


def _host(machine: dict[str, Any]) -> list[str]:
    cpu, memory, system = (machine.get(name) or {} for name in ("cpu", "memory", "system"))
    gpus = Counter(str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or [] if isinstance(gpu, dict))
    versions = {name: value for name, value in (machine.get("versions") or {}).items() if value}
    return [
        str(machine.get("host")),
        f"{cpu.get('model') or cpu.get('architecture') or 'unknown'}, {cpu.get('num_cores_usable', '?')} cores",
        ", ".join(f"{many} × {name}" for name, many in gpus.items()) or "none",
        size(memory["total_bytes"]) if memory.get("total_bytes") else "unknown",
        " ".join(str(system[key]) for key in ("distribution", "architecture") if system.get(key)),
        ", ".join(f"{name} {value}" for name, value in versions.items()),
        str(machine.get("commit") or "unknown")[:12],
    ]


def _configuration(experiment: Experiment, named: bool) -> list[Table]:
    flat = [{"ranks": run.ranks, **flatten(run.config)} for run in experiment.runs]
    differing, common = [], []
    for key in dict.fromkeys(key for table in flat for key in table):
        values = Counter(value_text(table[key]) if key in table else "not set" for table in flat)
        if len(values) > 1:
            differing.append([key, listed((f"{value} ({count(n, 'run')})" for value, n in values.most_common()), _MOST_VALUES)])
        else:
            common.append([key, next(iter(values))])
    name = f": {experiment.name}" if named else ""
    first = Table(
        title=f"What differs between {count(len(flat), 'run')}{name}",
        columns=["key", "values"],
        rows=differing,
        marked=frozenset(range(len(differing))),
    )
    same = Table(
        title=f"Configuration{' that all share' if len(flat) > 1 else ''}{name}", columns=["key", "value"], rows=common, folded=True
    )
    return [first, same] if differing else [same]
