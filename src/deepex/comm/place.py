"""Who am I? Rank, size, local rank and node, from the variables that each launcher sets.

    place = find_place(os.environ)
    place.rank, place.size, place.local_rank, place.launcher     # 3, 8, 1, "slurm"

The order of the look-ups matters: `mpiexec` inside a Slurm allocation leaves both launchers' variables set, and the inner one
(the MPI's) is the one that started us. A Slurm batch script has SLURM_PROCID but was not started by srun: there SLURM_STEP_ID is
missing, and we are alone. RANK and WORLD_SIZE alone, as some schedulers set them for PyTorch, come last: their names are not a
launcher's own.
"""

import re
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
    """The variables of one launcher; the first that is set counts. One of `requires` must be set too.

    `node_sizes` list the ranks of every node, as Slurm writes it: "3,1" or "2(x2)".
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    node_sizes: tuple[str, ...] = ()
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
        node_sizes=("SLURM_STEP_TASKS_PER_NODE",),
        requires=("SLURM_STEP_ID", "SLURM_SRUN_COMM_PORT"),
    ),
    _Launcher(  # PBS with HPE PALS (mpiexec on Cray EX)
        name="pals",
        rank=("PALS_RANKID",),
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node=("PALS_NODEID",),
    ),
    _Launcher(name="pmi", rank=("PMI_RANK",), size=("PMI_SIZE",)),  # an older mpiexec that tells no more
    _Launcher(
        name="environment",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        requires=("WORLD_SIZE",),
    ),
)

_NODE_SIZE: Final = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")
_SLURM_SHELLS: Final = ("4294967290", "4294967291")  # the interactive step of salloc, the step of a batch script


def find_place(environ: Mapping[str, str]) -> Place:
    """Read the place of this process from `environ`. What a launcher does not tell is filled in as for one node.

    A communicator that runs can tell more: `Communicator.place` has the local size and node counted by the ranks themselves.
    """
    for launcher in LAUNCHERS:
        if _first(environ, launcher.rank) is not None and _started(environ, launcher):
            return _place(environ, launcher)
    return Place(host=socket.gethostname())


def _started(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    """Whether a launcher's own marks are there (one of `requires`); Slurm gives the shells of its jobs a mark that means none."""
    if environ.get("SLURM_STEP_ID") in _SLURM_SHELLS and launcher.name == "slurm":
        return False
    return not launcher.requires or any(name in environ for name in launcher.requires)


def _place(environ: Mapping[str, str], launcher: _Launcher) -> Place:
    """Fill in what the launcher does not tell; what it does tell must fit together, or `Place` refuses it."""
    rank = _number(environ, launcher, launcher.rank, least=None)
    size = _number(environ, launcher, launcher.size)
    nodes_told = _first(environ, launcher.num_nodes) is not None
    num_nodes = _number(environ, launcher, launcher.num_nodes) if nodes_told else 1
    sizes = _node_sizes(environ, launcher)
    node = _number(environ, launcher, launcher.node, least=None) if _first(environ, launcher.node) else None
    listed = sizes[node] if sum(sizes) == size and node is not None and 0 <= node < len(sizes) else None
    local_told = _first(environ, launcher.local_size) is not None
    local_size = _number(environ, launcher, launcher.local_size) if local_told else listed or -(-size // num_nodes)
    local_rank = _number(environ, launcher, launcher.local_rank, rank % local_size, least=None)
    if not nodes_told:
        num_nodes = -(-size // local_size)
    if node is None:
        guess = rank // local_size if num_nodes > 1 else 0
        node = guess if nodes_told or launcher.node else min(guess, num_nodes - 1)
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size if local_told else max(local_size, local_rank + 1),
        node=node,
        num_nodes=num_nodes if nodes_told else max(num_nodes, node + 1),
        host=socket.gethostname(),
        launcher=launcher.name,
    )


def _node_sizes(environ: Mapping[str, str], launcher: _Launcher) -> list[int]:
    """How many ranks each node has, where the launcher lists it: nodes may differ. What cannot be read tells nothing."""
    name = _first(environ, launcher.node_sizes)
    found = [_NODE_SIZE.fullmatch(part) for part in environ[name].split(",")] if name is not None else []
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))] if all(found) else []


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environ), None)


def _number(
    environ: Mapping[str, str], launcher: _Launcher, names: tuple[str, ...], default: int | None = None, *, least: int | None = 1
) -> int:
    name = _first(environ, names)
    if name is None:
        if default is None:
            rank = _first(environ, launcher.rank)
            raise CommError(f"{rank} is set, but none of {', '.join(names)}: start through {launcher.name} again, or unset {rank}")
        return default
    try:
        value = int(environ[name])
    except ValueError:
        raise CommError(f"{name} is {environ[name]!r}; {launcher.name} sets it to a whole number: unset it") from None
    if least is not None and value < least:
        raise CommError(f"{name} is {value}; {launcher.name} sets it to at least {least}: unset it")
    return value
