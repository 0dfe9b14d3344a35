"""Which communicator this job gets, and why.

comm = connect("auto", device="cuda", environ=os.environ)
choose("auto", place=place, device="cpu").reason     # "4 ranks on CPUs: the machine's MPI"
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepex.comm.base import Communicator
from deepex.comm.place import Place, find_place
from deepex.comm.solo import SoloCommunicator
from deepex.errors import CommError, ConfigError, UnknownName
from deepex.machine.hardware import describe_cpu

KINDS = ("auto", "solo", "mpi", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The kind of communicator that was chosen, and the sentence that says why."""

    kind: str
    reason: str


def choose(kind: str = "auto", *, place: Place, device: str, mpi_cuda_aware: bool | None = None, num_devices: int = 1) -> Choice:
    """Choose a kind for a job whose ranks compute on `device` ("cpu" or "cuda"), `num_devices` of them per node."""
    if kind not in KINDS:
        raise UnknownName("communicator", kind, KINDS)
    if kind != "auto":
        return _asked_for(kind, place, device)
    if place.size == 1:
        return Choice(kind="solo", reason="one rank: nothing to communicate")
    if device == "cuda" and place.local_size <= num_devices:
        return Choice(kind="nccl", reason="one GPU per rank: NCCL")
    if place.launcher == "torchrun":
        return Choice(kind="gloo", reason="started by torchrun, without a GPU per rank: gloo")
    if device == "cuda":
        how = "by device pointer" if mpi_cuda_aware else "staged through pinned host memory"
        return Choice(kind="mpi", reason=f"{place.local_size} ranks share {num_devices} GPU(s), which NCCL refuses: MPI, {how}")
    return Choice(kind="mpi", reason=f"{place.size} ranks on CPUs: the machine's MPI")


def connect(
    kind: str = "auto", *, device: str = "cpu", environ: Mapping[str, str] | None = None, thread_level: str = "FUNNELED"
) -> Communicator:
    """Build the communicator of all ranks that the launcher started.

    `thread_level` is what MPI is started with where it carries the data, at least: "MULTIPLE" where it may be in the background.
    """
    import torch

    environ = os.environ if environ is None else environ
    place = find_place(environ)
    num_devices = torch.cuda.device_count() if device == "cuda" else 1
    chosen = choose(kind, place=place, device=device, num_devices=num_devices).kind
    if chosen == "solo":
        return SoloCommunicator()
    if device == "cuda":
        torch.cuda.set_device(place.local_rank % max(num_devices, 1))
    if "MASTER_ADDR" in environ and chosen != "mpi":
        return _distributed(chosen, None)
    mpi = _mpi(place, thread_level if kind in ("auto", "mpi") else "FUNNELED")
    if kind == "auto":  # nodes may differ, and all ranks must take the same: NCCL only if every rank has a GPU of its own
        own = all(mpi.gather(mpi.place.local_size <= num_devices))
        chosen = "nccl" if device == "cuda" and own else "mpi"
    return mpi if chosen == "mpi" else _distributed(chosen, mpi)


def shares_cores(place: Place) -> bool:
    """Whether the node has fewer cores than ranks of this job. A rank that is bound to one core has that for itself."""
    cpu = describe_cpu()
    cores = [cpu[name] for name in ("num_cores_logical", "num_cores_limit") if cpu[name]]
    return bool(cores) and place.local_size > min(cores)


def _mpi(place: Place, thread_level: str) -> Communicator:
    from deepex.comm.mpi import MpiCommunicator

    # MPICH gives its core away while it waits only where several threads may call it. Without, ranks that share cores wait for the
    # end of each other's time slices: a sum over 4 ranks on 2 cores takes 16 ms instead of 0.4 (`deepex study transfer`).
    comm = MpiCommunicator(thread_level="MULTIPLE" if shares_cores(place) else thread_level)
    if comm.size != place.size:
        raise CommError(
            f"the launcher ({place.launcher}) started {place.size} ranks, but the MPI library sees {comm.size}: the MPI that "
            "mpi4py loaded is not the launcher's; name the site's in MPI4PY_LIBMPI, or use srun --mpi=pmi2 with MPICH"
        )
    return comm


def _distributed(kind: str, bootstrap: Communicator | None) -> Communicator:
    from deepex.comm.distributed import DistributedCommunicator

    return DistributedCommunicator(kind, bootstrap=bootstrap)


def as_communicator(comm: Any) -> Communicator:
    """Take what a caller hands over: one of ours as it is, an mpi4py communicator wrapped."""
    if isinstance(comm, Communicator):
        return comm
    mpi = sys.modules.get("mpi4py.MPI")  # whoever holds one of its communicators has imported it
    if mpi is not None and isinstance(comm, mpi.Comm) and comm != mpi.COMM_NULL:
        from deepex.comm.mpi import MpiCommunicator

        return MpiCommunicator(comm)
    raise ConfigError(
        f"comm is {comm!r} ({type(comm).__name__}); it must be an mpi4py communicator, for example MPI.COMM_WORLD, "
        "or a deepex.comm.Communicator"
    )


def _asked_for(kind: str, place: Place, device: str) -> Choice:
    if kind == "solo" and place.size > 1:
        raise ConfigError(f"comm is solo, but the launcher started {place.size} ranks: use auto, mpi, gloo or nccl")
    if kind == "nccl" and device != "cuda":
        raise ConfigError(f"comm is nccl, but the device is {device}: NCCL needs GPUs; use mpi or gloo")
    return Choice(kind=kind, reason="asked for")
