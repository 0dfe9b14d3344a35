"""Job scripts of a plan, for machines where a batch system runs it: one script for each run, and one that submits them all.

    write_scripts(study, "slurm", Batch(minutes=30, lines=("#SBATCH --account=abc",)))

Each script starts its ranks with the system's own launcher and writes into the study directory, so that afterwards `deepex report`
reads it as if the study had run here. A run that has finished ends at once; one that was cut off goes on from its checkpoint.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepex.errors import UnknownName
from deepex.record import PlannedRun, StudyDirectory
from deepex.record.files import write_text

_PYTHON: Final = "python -m"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a batch system wants to know; `lines` go into every script as they are: account, queue, modules to load."""

    ranks_per_node: int = 1
    minutes: int = 60
    lines: tuple[str, ...] = ()


def _slurm(planned: PlannedRun, batch: Batch, log: str) -> tuple[list[str], str]:
    head = [
        f"#SBATCH --job-name={planned.name}",
        f"#SBATCH --nodes={_nodes(planned, batch)}",
        f"#SBATCH --ntasks={planned.ranks}",
        f"#SBATCH --ntasks-per-node={min(planned.ranks, batch.ranks_per_node)}",
        f"#SBATCH --time={batch.minutes}",
        f"#SBATCH --output={log}",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@120",
    ]
    return head, f"srun -n {planned.ranks}"


def _lsf(planned: PlannedRun, batch: Batch, log: str) -> tuple[list[str], str]:
    head = [
        f"#BSUB -J {planned.name}",
        f"#BSUB -nnodes {_nodes(planned, batch)}",
        f"#BSUB -W {batch.minutes}",
        f"#BSUB -o {log}",
        "#BSUB -wa USR1 -wt 2",
    ]
    return head, f"jsrun -n {planned.ranks} -a 1 -r {min(planned.ranks, batch.ranks_per_node)}"


def _pbs(planned: PlannedRun, batch: Batch, log: str) -> tuple[list[str], str]:
    each = min(planned.ranks, batch.ranks_per_node)
    head = [
        f"#PBS -N {planned.name[:15]}",
        f"#PBS -l select={_nodes(planned, batch)}:mpiprocs={each}",
        f"#PBS -l walltime={batch.minutes // 60:02}:{batch.minutes % 60:02}:00",
        f"#PBS -o {log}",
        "#PBS -j oe",
    ]
    return head, f"mpiexec -n {planned.ranks}"


SYSTEMS: Final[dict[str, tuple[Callable[[PlannedRun, Batch, str], tuple[list[str], str]], str]]] = {
    "slurm": (_slurm, "sbatch"),
    "lsf": (_lsf, "bsub <"),
    "pbs": (_pbs, "qsub"),
}


def write_scripts(study: StudyDirectory, system: str, batch: Batch) -> Path:
    """Write the scripts into `scripts/` of the study; gives the one that submits them."""
    if system not in SYSTEMS:
        raise UnknownName("batch system", system, SYSTEMS)
    folder = study.path.resolve() / "scripts"
    folder.mkdir(exist_ok=True)
    make, submit = SYSTEMS[system]
    names = []
    for planned in study.plan:
        names.append(f"{planned.name}.sh")
        write_text(folder / names[-1], script(study, planned, batch, make))
    all_of_them = "".join(f"{submit} {shlex.quote(str(folder / name))}\n" for name in names)
    write_text(folder / "submit.sh", f"#!/bin/sh\nset -e\n{all_of_them}")
    return folder / "submit.sh"


def script(
    study: StudyDirectory, planned: PlannedRun, batch: Batch, make: Callable[[PlannedRun, Batch, str], tuple[list[str], str]]
) -> str:
    """One script: what the system is told, then the run, or the rest of one that was cut off."""
    out = study.run_path(planned).resolve()
    if planned.before or planned.command[0] != "deepex":  # these write into a directory that is there
        out.mkdir(parents=True, exist_ok=True)
    head, launcher = make(planned, batch, str(study.path.resolve() / "scripts" / f"{planned.name}.log"))
    first = [f"{_PYTHON} {shlex.join(planned.before)} --out {shlex.quote(str(out))} || exit 1"] if planned.before else []
    begin = f"{launcher} {_PYTHON} {shlex.join(planned.command)} --out {shlex.quote(str(out))}"
    lines = ["#!/bin/bash", *head, *batch.lines, f"cd {shlex.quote(str(Path.cwd()))}", *first]
    if planned.command[0] != "deepex":
        return "\n".join([*lines, begin, ""])
    resume, begun = f"{launcher} {_PYTHON} deepex train --resume {shlex.quote(str(out))}", shlex.quote(str(out / "run.json"))
    return "\n".join([*lines, f"if [ -e {begun} ]; then", f"  {resume}", "else", f"  {begin}", "fi", ""])


def _nodes(planned: PlannedRun, batch: Batch) -> int:
    return -(-planned.ranks // batch.ranks_per_node)
