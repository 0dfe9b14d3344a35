"""How a rank ends when the others do not come, or when it cannot go on: with one line that names it, and with the job.

    with deadline("the communicator", place, os.environ):     # a rank that waits longer says so and ends the job
        comm = …
    fail("batch is 0; it must be at least 1", code=2)

Nothing here loads torch.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic, sleep
from typing import Final, NoReturn

from deepex.comm.joining import SECONDS, deadline_seconds
from deepex.comm.launch import leave_code
from deepex.comm.library import running_mpi
from deepex.comm.place import Place, find_place
from deepex.errors import INTERRUPTED, DeepexError

TICK: Final = 0.25
STAGGER: Final = 0.3  # between the ranks that give up: the first ends the others before they repeat its message

_ABORT_SECONDS: Final = 2.0
_CANCEL_SECONDS: Final = 5.0


@contextmanager
def deadline(awaited: str, place: Place, environ: Mapping[str, str]) -> Iterator[None]:
    """End the job with one line if what is within takes too long: some rank has not come.

    A thread watches, for the rank itself may wait in a library. It counts the time in which
    it was let run, as a machine that starves this rank starves those it waits for.
    """
    if place.size == 1:
        yield
        return
    seconds, done = deadline_seconds(environ, place.num_nodes), Event()

    def watch() -> None:
        waited, limit = 0.0, seconds + min(place.rank, 10) * STAGGER
        while waited < limit:
            began = monotonic()
            if done.wait(TICK):
                return
            waited += min(monotonic() - began, 2 * TICK)
        give_up(
            place, f"has waited {seconds:.0f} s for {awaited}: not all of the {place.size} ranks have come; {remedy()}", environ
        )

    watching = Thread(target=watch, daemon=True, name="deepex-start")
    watching.start()
    try:
        yield
    finally:
        done.set()


def remedy() -> str:
    """What a person can do about ranks that have not come."""
    return f"the missing ones may have said why; for a start that is slow, set {SECONDS} higher"


def give_up(place: Place, message: str, environ: Mapping[str, str]) -> NoReturn:
    """Say one line and end this rank, and with it the job."""
    sys.stderr.write(f"deepex: rank {place.rank} on {place.host or socket.gethostname()}: {message}\n")
    sys.stderr.flush()
    leave_code(1, environ)
    if running_mpi() is None and place.launcher == "slurm":
        _cancel_step(environ)
    end(1)


def end(code: int) -> NoReturn:
    """End the job as far as this rank can, at once: other threads may hang in a library."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.size > 1:
        Thread(target=lambda: mpi.COMM_WORLD.Abort(code), daemon=True).start()
        sleep(_ABORT_SECONDS)
    os._exit(code)


def _cancel_step(environ: Mapping[str, str]) -> None:
    """End the step of Slurm that this rank is of: before MPI is up nobody else can, and srun waits for ranks that hang."""
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["scancel", step]
        subprocess.run(command, check=False, capture_output=True, timeout=_CANCEL_SECONDS)  # noqa: S603 - our own step


def fail(message: str, code: int, *, agreed: bool = False) -> NoReturn:
    """Print one line and end. Of ranks that all have the same error rank 0 speaks; else this one names itself, and ends the job."""
    try:
        place = find_place(os.environ)
    except DeepexError:
        place = Place()
    if place.rank > 0:
        sleep(0.5 + min(place.rank, 10) * 0.1)  # a launcher may end the others as soon as one has; let the lowest speak first
    if place.rank == 0 or not (agreed or code == INTERRUPTED):
        named = f"rank {place.rank} on {socket.gethostname()}: " if place.size > 1 and not (agreed or code == INTERRUPTED) else ""
        sys.stderr.write(f"deepex: {named}{message}\n")
        sys.stderr.flush()
        leave_code(code, os.environ)
    if not agreed and place.size > 1 and running_mpi() is not None:
        end(code)
    sys.exit(code)
