"""The MPI library of this process: loaded without being started, and started with one thread level on every rank.

    mpi = import_mpi()             # mpi4py.MPI, which has not started MPI
    mpi = start_mpi()              # MPI runs
    mpi = running_mpi()            # None, if it does not

The level is the same whatever a rank's node and configuration: ranks of MPICH that differ in it take different algorithms for one
collective, and give wrong sums without an error. THREAD_MULTIPLE is what a sync in the background needs, and with it MPICH's ranks
give their core away while they wait. On 2 ranks a barrier takes 3 µs with it and 1 µs without; a sum takes the same.

Nothing here loads torch.
"""

import atexit
import ctypes
import sys
from threading import Lock
from typing import Any, Final

from deepex.comm.place import Place
from deepex.errors import CommError
from deepex.machine.mpi import find_function

ending: Final = Lock()  # held by whoever ends MPI, and by another thread than the main one while it calls MPI


def import_mpi() -> Any:
    """Import `mpi4py.MPI` without starting it."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(
            f"no MPI library could be loaded: {error}; install one with `pip install mpich`, "
            "or name the site's own in the variable MPI4PY_LIBMPI"
        ) from error
    return MPI


def start_mpi(thread_level: str = "MULTIPLE") -> Any:
    """Import mpi4py and initialise MPI if nobody has; return `mpi4py.MPI`.

    It may give less than the `thread_level` that is asked for: `overlaps` tells, and whoever needs it (`for_thread`) is refused.
    """
    mpi = import_mpi()
    if not mpi.Is_initialized():
        _initialise(mpi, getattr(mpi, f"THREAD_{thread_level}"))
        atexit.register(_finalize, mpi)
    if mpi.Query_thread() < mpi.THREAD_FUNNELED:
        raise CommError(
            "MPI runs with thread level SINGLE, but torch has threads: initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE) "
            "before the first communicator is built"
        )
    return mpi


def _initialise(mpi: Any, level: int) -> None:
    """Start MPI while other threads run: it waits for the other ranks, and mpi4py would hold the interpreter meanwhile."""
    function = find_function("MPI_Init_thread")
    if function is None:
        mpi.Init_thread(level)
    elif function(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int())) != mpi.SUCCESS:
        raise CommError("MPI could not be initialised; its own message above says why: see `deepex doctor`")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py makes exceptions, as it does where it starts MPI itself


def running_mpi() -> Any | None:
    """`mpi4py.MPI` if it runs in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def check_size(place: Place, seen: int) -> None:
    """Refuse an MPI that sees another job than the launcher started."""
    if seen != place.size:
        error = CommError(
            f"the launcher ({place.launcher}) started {place.size} ranks, but the MPI library sees {seen}: the MPI that "
            "mpi4py loaded is not the launcher's; start with srun --mpi=pmi2 for MPICH or --mpi=pmix for Open MPI, or name the "
            "site's library in MPI4PY_LIBMPI"
        )
        error.agreed = seen == 1 and place.launcher != "torchrun"  # each rank is alone, and finds the same
        raise error


def _finalize(mpi: Any) -> None:
    with ending:
        if not mpi.Is_finalized():
            mpi.Finalize()
