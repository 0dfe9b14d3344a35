"""Job scripts of a plan, for machines where a batch system runs it: one script for each run, and one that submits them all.

    job = JobEnvironment.here(probe_mpi(), os.environ)
    write_scripts(study, "slurm", Batch(minutes=30, lines=("#SBATCH --account=abc",)), job)

Each script starts its ranks with the system's own launcher and writes into the study directory, so that afterwards `deepex report`
reads it as if the study had run here. A run that has finished ends at once; one that was cut off goes on from its checkpoint.

A batch system may start a script with an empty environment (`sbatch --export=NONE`, PBS without `-V`). So a script names this very
Python and sets what it needs here to find its libraries.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from deepex.errors import UnknownName
from deepex.machine.mpi import srun_mpi
from deepex.record import PlannedRun, StudyDirectory
from deepex.record.files import write_text
from deepex.record.paths import check_path
from deepex.study.trust import check_study

_SEARCHED: Final = ("LD_LIBRARY_PATH", "PYTHONPATH")  # lists of directories: the job may have more of them
_SET: Final = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a batch system wants to know; `lines` go into every script as they are: account, queue, modules to load."""

    ranks_per_node: int = 1
    minutes: int = 60
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """What a job needs to find what runs here: the interpreter, `variables`, the MPI library's name and its own `mpiexec`."""

    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    mpi: str | None = None
    mpiexec: str | None = None

    @classmethod
    def here(cls, mpi: Mapping[str, Any], environ: Mapping[str, str]) -> Self:
        """That of this process; `mpi` is what `probe_mpi` has found."""
        variables = {name: environ[name] for name in (*_SEARCHED, *_SET) if environ.get(name)}
        for name, value in variables.items():
            check_path(value, name)
        return cls(variables=variables, mpi=mpi["vendor"], mpiexec=mpi["mpiexec"])

    @property
    def exports(self) -> list[str]:
        """The lines that set it, in front of what the site or a module has set."""
        own = {"PATH": str(Path(self.python).parent), **self.variables}
        return [
            f"export {name}={shlex.quote(value)}" + ("" if name in _SET else f'"${{{name}:+:${name}}}"')
            for name, value in own.items()
        ]


def _slurm(planned: PlannedRun, batch: Batch, job: JobEnvironment, log: str) -> tuple[list[str], str]:
    head = [
        f"#SBATCH --job-name={planned.name}",
        f"#SBATCH --nodes={_nodes(planned, batch)}",
        f"#SBATCH --ntasks={planned.ranks}",
        f"#SBATCH --ntasks-per-node={min(planned.ranks, batch.ranks_per_node)}",
        f"#SBATCH --time={batch.minutes}",
        f"#SBATCH --output={_quoted(log.replace('%', '%%'))}",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@120",
    ]
    # A job that was submitted with --export=NONE hands that on to srun, which would drop what the script sets.
    launcher, how = f"srun -n {planned.ranks} --export=ALL --kill-on-bad-exit=1", srun_mpi(job.mpi)
    if how:
        return head, f"{launcher} --mpi={how}"
    return [*head, f"# srun without --mpi: the site's default is for {job.mpi or 'its MPI; none could be loaded here'}"], launcher


def _lsf(planned: PlannedRun, batch: Batch, _job: JobEnvironment, log: str) -> tuple[list[str], str]:
    head = [
        f"#BSUB -J {planned.name}",
        f"#BSUB -nnodes {_nodes(planned, batch)}",
        f"#BSUB -W {batch.minutes}",
        f"#BSUB -o {_quoted(log)}",
        "#BSUB -wa USR1 -wt 2",
    ]
    return head, f"jsrun -n {planned.ranks} -a 1 -r {min(planned.ranks, batch.ranks_per_node)}"


def _pbs(planned: PlannedRun, batch: Batch, job: JobEnvironment, log: str) -> tuple[list[str], str]:
    each = min(planned.ranks, batch.ranks_per_node)
    head = [
        f"#PBS -N {planned.name[:15]}",
        f"#PBS -l select={_nodes(planned, batch)}:mpiprocs={each}",
        f"#PBS -l walltime={batch.minutes // 60:02}:{batch.minutes % 60:02}:00",
        f"#PBS -o {_quoted(log)}",
        "#PBS -j oe",
    ]
    if srun_mpi(job.mpi) is None or job.mpiexec is None:
        return [
            *head,
            f"# the site's mpiexec: that of {job.mpi or 'its MPI; none could be loaded here'}",
        ], f"mpiexec -n {planned.ranks}"
    # Open MPI's takes no variable to other nodes unless it is told to.
    told = "".join(f" -x {name}" for name in ("PATH", *job.variables)) if job.mpi == "Open MPI" else ""
    return head, f"{shlex.quote(job.mpiexec)} -n {planned.ranks}{told}"


_Make = Callable[[PlannedRun, Batch, JobEnvironment, str], tuple[list[str], str]]
SYSTEMS: Final[dict[str, tuple[_Make, str]]] = {
    "slurm": (_slurm, "sbatch"),
    "lsf": (_lsf, "bsub <"),
    "pbs": (_pbs, "qsub"),
}


def write_scripts(study: StudyDirectory, system: str, batch: Batch, job: JobEnvironment) -> Path:
    """Write the scripts into `scripts/` of the study; gives the one that submits them."""
    check_system(system)
    check_study(study)
    folder = study.path.resolve() / "scripts"
    check_path(folder, "the directory of the scripts")
    check_path(Path.cwd(), "the current directory")
    folder.mkdir(exist_ok=True)
    make, submit = SYSTEMS[system]
    names = []
    for planned in study.plan:
        names.append(f"{planned.name}.sh")
        write_text(folder / names[-1], script(study, planned, batch, job, make))
    all_of_them = "".join(f"{submit} {shlex.quote(str(folder / name))}\n" for name in names)
    write_text(folder / "submit.sh", f"#!/bin/sh\nset -e\n{all_of_them}")
    return folder / "submit.sh"


def check_system(system: str) -> None:
    """Refuse a batch system that is not known."""
    if system not in SYSTEMS:
        raise UnknownName("batch system", system, SYSTEMS)


def script(study: StudyDirectory, planned: PlannedRun, batch: Batch, job: JobEnvironment, make: _Make) -> str:
    """One script: what the system is told, then the run, or the rest of one that was cut off."""
    out = study.run_path(planned).resolve()
    if planned.before or planned.command[0] != "deepex":  # these write into a directory that is there
        out.mkdir(parents=True, exist_ok=True)
    head, launcher = make(planned, batch, job, str(study.path.resolve() / "scripts" / f"{planned.name}.log"))
    python = f"{shlex.quote(job.python)} -P -m"
    first = [f"{python} {shlex.join(planned.before)} --out {shlex.quote(str(out))} || exit 1"] if planned.before else []
    begin = f"{launcher} {python} {shlex.join(planned.command)} --out {shlex.quote(str(out))}"
    lines = ["#!/bin/bash", *head, *batch.lines, *job.exports, f"cd {shlex.quote(str(Path.cwd()))} || exit 1", *first]
    if planned.command[0] != "deepex":
        return "\n".join([*lines, begin, ""])
    resume, begun = f"{launcher} {python} deepex train --resume {shlex.quote(str(out))}", shlex.quote(str(out / "run.json"))
    return "\n".join([*lines, f"if [ -e {begun} ]; then", f"  {resume}", "else", f"  {begin}", "fi", ""])


def _quoted(path: str) -> str:
    """A path in a directive, which no shell reads: batch systems know double quotes, and the backslash within them."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return path if shlex.quote(path) == path else f'"{escaped}"'


def _nodes(planned: PlannedRun, batch: Batch) -> int:
    return -(-planned.ranks // batch.ranks_per_node)
