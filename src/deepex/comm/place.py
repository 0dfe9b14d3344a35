"""Who am I? Rank, size, local rank and node, from the variables that each launcher sets.

    place = find_place(os.environ)
    place.rank, place.size, place.local_rank, place.launcher     # 3, 8, 1, "slurm"

The order of the look-ups matters: `mpiexec` inside a Slurm allocation leaves both launchers' variables set, and the inner one
(the MPI's) is the one that started us. A Slurm batch script has SLURM_PROCID but was not started by srun: there SLURM_STEP_ID is
missing, and we are alone.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deepex.errors import CommError


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands. `launcher` is `none` for a process that nobody launched in parallel."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    host: str = ""
    launcher: str = "none"

    def __post_init__(self) -> None:
        inside = 0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size
        if not inside or not 0 <= self.node < self.num_nodes:
            raise CommError(
                f"the launcher {self.launcher!r} gave rank {self.rank} of {self.size}, local rank {self.local_rank} of "
                f"{self.local_size}, node {self.node} of {self.num_nodes}; ranks count from 0 below the size: "
                "unset the stale variables of an outer job"
            )


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables of one launcher; the first that is set counts. `requires` must be set too."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


LAUNCHERS: Final = (
    _Launcher(
        name="torchrun",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node=("GROUP_RANK",),
        num_nodes=("GROUP_WORLD_SIZE",),
        requires=("TORCHELASTIC_RUN_ID",),
    ),
    _Launcher(  # jsrun of LSF (Summit): Spectrum MPI is an Open MPI, so this comes before it
        name="jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    _Launcher(
        name="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(  # PBS with HPE PALS (mpiexec on Cray EX)
        name="pals",
        rank=("PALS_RANKID",),
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node=("PALS_NODEID",),
    ),
    _Launcher(
        name="flux",
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        num_nodes=("FLUX_JOB_NNODES",),
    ),
    _Launcher(  # MPICH's hydra, Intel MPI, MVAPICH; before Slurm, because srun starts hydra's own helpers inside an allocation
        name="mpich",
        rank=("PMI_RANK", "MV2_COMM_WORLD_RANK"),
        size=("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
        local_rank=("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
        requires=("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    ),
    _Launcher(
        name="slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        requires=("SLURM_STEP_ID", "SLURM_SRUN_COMM_PORT"),
    ),
    _Launcher(name="pmi", rank=("PMI_RANK",), size=("PMI_SIZE",)),  # an older mpiexec that tells no more
)


def find_place(environ: Mapping[str, str]) -> Place:
    """Read the place of this process from `environ`. What a launcher does not tell is filled in as for one node.

    A communicator that runs can tell more: `Communicator.place` has the local size and node counted by the ranks themselves.
    """
    for launcher in LAUNCHERS:
        if _first(environ, launcher.rank) is not None and _all_given(environ, launcher):
            return _place(environ, launcher)
    return Place(host=socket.gethostname())


def _all_given(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    """Whether a launcher's own marks are there; srun sets one of its two, depending on its version."""
    return not launcher.requires or any(name in environ for name in launcher.requires)


def _place(environ: Mapping[str, str], launcher: _Launcher) -> Place:
    rank = _number(environ, launcher, launcher.rank, 0)
    size = _number(environ, launcher, launcher.size, None)
    num_nodes = _number(environ, launcher, launcher.num_nodes, 1)
    local_size = _number(environ, launcher, launcher.local_size, -(-size // num_nodes))
    local_rank = _number(environ, launcher, launcher.local_rank, rank % local_size)
    if not launcher.num_nodes and local_size < size:
        num_nodes = -(-size // local_size)
    node = _number(environ, launcher, launcher.node, rank // local_size if num_nodes > 1 else 0)
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(local_size, local_rank + 1),
        node=node,
        num_nodes=max(num_nodes, node + 1),
        host=socket.gethostname(),
        launcher=launcher.name,
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environ), None)


def _number(environ: Mapping[str, str], launcher: _Launcher, names: tuple[str, ...], default: int | None) -> int:
    name = _first(environ, names)
    if name is None:
        if default is None:
            raise CommError(f"{launcher.rank[0]} is set, but none of {', '.join(names)}: start through {launcher.name} again")
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise CommError(f"{name} is {environ[name]!r}; {launcher.name} sets it to a whole number: unset it") from None
