"""Which communicator this job gets, and why.

comm = connect("auto", device="cuda", environ=os.environ)
choose("auto", place=place, device="cpu").reason     # "4 ranks on CPUs: the machine's MPI"
"""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import sleep
from typing import Any, Final

from deepex.comm.base import Communicator
from deepex.comm.deadline import deadline, give_up
from deepex.comm.joining import note
from deepex.comm.library import check_size, running_mpi, start_mpi
from deepex.comm.place import Place, find_place
from deepex.comm.same import gather_same
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.errors import CommError, ConfigError, UnknownName, UserError

KINDS = ("auto", "solo", "mpi", "gloo", "nccl")

_BY_TORCH: Final = {"torchrun": "torchrun", "environment": "RANK and WORLD_SIZE"}  # ranks that MPI does not join


@dataclass(frozen=True, kw_only=True)
class CommChoice:
    """The kind of communicator that was chosen, and the sentence that says why."""

    kind: str
    reason: str


def choose(
    kind: str = "auto",
    *,
    place: Place,
    device: str,
    mpi_cuda_aware: bool | None = None,
    own_device: bool = True,
    num_devices: int = 1,
) -> CommChoice:
    """Choose a kind for a job whose ranks compute on `device` ("cpu" or "cuda").

    `own_device`: whether each rank has a GPU that is no other's; `num_devices`: how many a node's ranks have between them, if not.
    """
    if kind not in KINDS:
        raise UnknownName("communicator", kind, KINDS)
    if kind != "auto":
        return _asked_for(kind, place, device)
    if place.size == 1:
        return CommChoice(kind="solo", reason="one rank: nothing to communicate")
    if device == "cuda" and own_device:
        return CommChoice(kind="nccl", reason="one GPU per rank: NCCL")
    if place.launcher in _BY_TORCH:
        return CommChoice(kind="gloo", reason=f"started by {_BY_TORCH[place.launcher]}, without a GPU per rank: gloo")
    if device == "cuda":
        how = "by device pointer" if mpi_cuda_aware else "staged through pinned host memory"
        return CommChoice(kind="mpi", reason=f"{place.local_size} ranks share {num_devices} GPU(s), which NCCL refuses: MPI, {how}")
    return CommChoice(kind="mpi", reason=f"{place.size} ranks on CPUs: the machine's MPI")


def connect(kind: str = "auto", *, device: str = "cpu", environ: Mapping[str, str] | None = None) -> Communicator:
    """Build the communicator of all ranks that the launcher started, or end the job with one line."""
    environ = os.environ if environ is None else environ
    place = find_place(environ)
    first = choose(kind, place=place, device=device)  # before anything waits: what is asked for may be a mistake
    note(environ, "started", place.rank)
    if first.kind == "solo":
        comm: Communicator = SoloCommunicator()
        comm.reason = first.reason
    else:
        with deadline("the communicator", place, environ), _ending_all(place):
            comm = _connect(kind, first, place, device, environ)
    note(environ, "connected", place.rank)
    atexit.register(note, environ, "ended", place.rank)  # which a rank that is killed, or leaves in the middle, does not come to
    return comm


def _connect(kind: str, first: CommChoice, place: Place, device: str, environ: Mapping[str, str]) -> Communicator:
    """Join the others, through MPI if it carries the job, and choose by what all have then: nodes may differ, ranks may not."""
    if device == "cuda":
        import torch

        torch.cuda.set_device(place.local_rank % max(torch.cuda.device_count(), 1))
    by_torch = place.launcher in _BY_TORCH or ("MASTER_ADDR" in environ and first.kind != "mpi")
    if kind in ("gloo", "nccl") and by_torch:
        base = comm = _distributed(kind, None)
    else:
        base = comm = _distributed("gloo", None) if by_torch and kind != "mpi" else _mpi(place)
    chosen = first
    name = device_name() if device == "cuda" else ""
    devices = gather_same(base, {"comm": kind, "the device": device}, [base.place.node, name])
    if kind == "auto" and device == "cuda":
        mine = {name for node, name in devices if node == base.place.node}
        own = len({name for _, name in devices}) == base.size
        cuda_aware = getattr(base, "cuda_aware", None)
        chosen = choose(place=_met(place, base), device=device, own_device=own, num_devices=len(mine), mpi_cuda_aware=cuda_aware)
    if chosen.kind != base.kind:
        comm = _mpi(place) if chosen.kind == "mpi" else _distributed(chosen.kind, base)
    comm.reason = chosen.reason
    return comm


def _met(place: Place, comm: Communicator) -> Place:
    """What the launcher told, with what the ranks have counted themselves."""
    return replace(comm.place, launcher=place.launcher)


def device_name(device: Any = None) -> str:
    """What tells this rank's GPU, the current one by default, from all others: ranks may each see one, and call it number 0."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).uuid)


@contextmanager
def _ending_all(place: Place) -> Iterator[None]:
    """End the job if this rank cannot join, as the others would wait for it. A mistake that all make alike is raised."""
    try:
        yield
    except UserError:
        raise
    except AgreedError as agreed:
        agreed.error.agreed = True
        raise agreed.error from None
    except Exception as error:
        mpi = running_mpi()
        if mpi is None or mpi.COMM_WORLD.size == 1:
            raise _as_ours(error) from error
        sleep(min(place.rank, 10) * 0.1)  # where all fail alike, the lowest ends the others before they repeat its message
        give_up(place, f"cannot join the others: {_as_ours(error)}", os.environ)


def _as_ours(error: Exception) -> CommError:
    if isinstance(error, CommError):
        return error
    reason = str(error).partition("\n")[0].removesuffix("Exception raised from").strip()
    return CommError(f"{type(error).__name__}: {reason}; `deepex doctor` tells what this machine's communication can do")


def _mpi(place: Place) -> Communicator:
    check_size(place, start_mpi().COMM_WORLD.size)
    from deepex.comm.mpi import MpiCommunicator

    return MpiCommunicator()


def _distributed(kind: str, base: Communicator | None) -> Communicator:
    from deepex.comm.distributed import DistributedCommunicator

    return DistributedCommunicator(kind, bootstrap=base)


def as_communicator(comm: Any) -> Communicator:
    """Take what a caller hands over: one of ours as it is, an mpi4py communicator wrapped."""
    if isinstance(comm, Communicator):
        return comm
    mpi = sys.modules.get("mpi4py.MPI")  # whoever holds one of its communicators has imported it
    if mpi is not None and isinstance(comm, mpi.Comm):
        if comm == mpi.COMM_NULL:
            raise ConfigError("comm is MPI.COMM_NULL, as one is that was freed; give a communicator that has this rank in it")
        if comm.Is_inter():
            raise ConfigError("comm is an intercommunicator; give the communicator of one group, or Merge() it")
        from deepex.comm.mpi import MpiCommunicator

        return MpiCommunicator(comm)
    raise ConfigError(
        f"comm is {comm!r} ({type(comm).__name__}); it must be an mpi4py communicator, for example MPI.COMM_WORLD, "
        "or a deepex.comm.Communicator"
    )


def _asked_for(kind: str, place: Place, device: str) -> CommChoice:
    if kind == "solo" and place.size > 1:
        raise ConfigError(f"comm is solo, but the launcher started {place.size} ranks: use auto, mpi, gloo or nccl")
    if kind == "nccl" and device != "cuda":
        raise ConfigError(f"comm is nccl, but the device is {device}: NCCL needs GPUs; use mpi or gloo")
    return CommChoice(kind=kind, reason="asked for")
