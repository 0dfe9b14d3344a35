"""The start of a job: MPI first, a deadline while ranks wait for each other, and what they must agree on before anything is built.

    start = Start.begin(os.environ)                      # before torch is loaded; MPI is up then, if it carries the job
    config = start.agree(lambda: read_config(path))      # what one rank fails with, all raise
    with deadline("…", start.place, os.environ):         # a rank that waits longer says so and ends the job
        comm = …

MPI starts with one thread level on every rank, whatever the rank's node and configuration: ranks of MPICH that differ in it take
different algorithms for one collective, and give wrong sums without an error. THREAD_MULTIPLE is what a sync in the background
needs, and with it MPICH's ranks give their core away while they wait. On 2 ranks a barrier takes 3 µs with it and 1 µs without; a
sum takes the same. mpi4py comes before torch, as centres with several MPIs advise: the libraries of both may be one.

Nothing here loads torch.
"""

import atexit
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any, Final, NoReturn, TypeVar

from deepex.comm.joining import SECONDS, deadline_seconds, note
from deepex.comm.launch import leave_code
from deepex.comm.place import Place, find_place
from deepex.comm.together import rebuilt
from deepex.errors import CommError, DeepexError, FailureError

T = TypeVar("T")

WITHOUT_MPI: Final = ("torchrun", "environment", "none")  # launchers whose ranks join through torch.distributed

_TICK: Final = 0.25
_STAGGER: Final = 0.3  # between the ranks that give up: the first ends the others before they repeat its message
_LONGEST_WORD: Final = 4000  # characters; mpi4py receives 32 KB at most without being told more
_TAG: Final = 7071

ending: Final = Lock()  # held by whoever ends MPI, and by another thread than the main one while it calls MPI


def start_mpi(thread_level: str = "MULTIPLE") -> Any:
    """Import mpi4py and initialise MPI if nobody has; return `mpi4py.MPI`.

    It may give less than the `thread_level` that is asked for: `overlaps` tells, and whoever needs it (`for_thread`) is refused.
    """
    mpi = import_mpi()
    if not mpi.Is_initialized():
        mpi.Init_thread(getattr(mpi, f"THREAD_{thread_level}"))
        atexit.register(_finalize, mpi)
    if mpi.Query_thread() < mpi.THREAD_FUNNELED:
        raise CommError(
            "MPI runs with thread level SINGLE, but torch has threads: initialise it with MPI.Init_thread(MPI.THREAD_MULTIPLE) "
            "before the first communicator is built"
        )
    return mpi


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


def running_mpi() -> Any | None:
    """`mpi4py.MPI` if it runs in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


@dataclass(frozen=True)
class Start:
    """A rank that has been started, and knows of the others no more than MPI tells it."""

    place: Place
    hosts: tuple[str, ...] = ()  # of every rank, where MPI carries the job

    @classmethod
    def begin(cls, environ: Mapping[str, str]) -> "Start":
        """Start MPI if this rank is one of several that MPI joins. Collective then."""
        place = find_place(environ)
        note(environ, "started", place.rank)
        if place.size == 1 or place.launcher in WITHOUT_MPI:
            return cls(place)
        with deadline("MPI to start", place, environ):
            mpi = start_mpi()
            check_size(place, mpi.COMM_WORLD.size)
            return cls(place, tuple(mpi.COMM_WORLD.allgather(place.host)))

    def agree(self, work: Callable[[], T], environ: Mapping[str, str]) -> T:
        """Run `work` on every rank, without communication in it; if it fails anywhere, raise that error everywhere.

        Where no MPI carries the job, each rank is on its own until it has a communicator.
        """
        if not self.hosts:
            return work()
        error: DeepexError | None = None
        result: list[T] = []
        try:
            result.append(work())
        except Exception as caught:
            if "DEEPEX_DEBUG" in environ and not isinstance(caught, DeepexError):
                raise
            error = caught if isinstance(caught, DeepexError) else FailureError(f"{type(caught).__name__}: {caught}")
        verdict = self._tell(error, deadline_seconds(environ, self.place.num_nodes), environ)
        if verdict is not None:
            agreed = rebuilt(*verdict)
            agreed.agreed = True
            raise agreed from error
        return result[0]

    def _tell(self, error: DeepexError | None, seconds: float, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell rank 0 whether this one failed, and hear whether any did. Rank 0 asks each, so it knows who is missing."""
        world = start_mpi().COMM_WORLD
        word = None if error is None else (type(error).__name__, str(error)[:_LONGEST_WORD])
        if world.rank:
            world.isend(word, 0, _TAG)
            heard: tuple[str, str] | None = self._await({0: world.irecv(source=0, tag=_TAG)}, seconds + 2, environ)[0]
            return heard
        words = self._await({rank: world.irecv(source=rank, tag=_TAG) for rank in range(1, world.size)}, seconds, environ)
        verdict = _verdict({0: word, **words}, self.hosts)
        for sent in [world.isend(verdict, rank, _TAG) for rank in range(1, world.size)]:
            sent.wait()
        return verdict

    def _await(self, requests: dict[int, Any], seconds: float, environ: Mapping[str, str]) -> dict[int, Any]:
        words, waited, pause = {}, 0.0, 1e-4
        while requests:
            for rank in list(requests):
                done, word = requests[rank].test()
                if done:
                    words[rank] = word
                    del requests[rank]
            if waited > seconds:
                others = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in list(requests)[:8])
                give_up(self.place, f"{others} has not answered for {seconds:.0f} s; {_remedy()}", environ)
            began = monotonic()
            sleep(pause)
            waited += min(monotonic() - began, 2 * _TICK)
            pause = min(2 * pause, 0.01)
        return words


def _verdict(words: Mapping[int, tuple[str, str] | None], hosts: tuple[str, ...]) -> tuple[str, str] | None:
    """The error of the lowest rank that has one; with its name, unless all have the same."""
    failed = {rank: word for rank, word in words.items() if word is not None}
    if not failed:
        return None
    rank = min(failed)
    kind, message = failed[rank]
    alike = len(failed) == len(hosts) and set(failed.values()) == {failed[rank]}
    return kind, message if alike else f"rank {rank} on {hosts[rank]}: {message}"


def check_size(place: Place, seen: int) -> None:
    """Refuse an MPI that sees another job than the launcher started."""
    if seen != place.size:
        raise CommError(
            f"the launcher ({place.launcher}) started {place.size} ranks, but the MPI library sees {seen}: the MPI that "
            "mpi4py loaded is not the launcher's; start with srun --mpi=pmi2 for MPICH or --mpi=pmix for Open MPI, or name the "
            "site's library in MPI4PY_LIBMPI"
        )


@contextmanager
def deadline(awaited: str, place: Place, environ: Mapping[str, str]) -> Iterator[None]:
    """End the job with one line if what is within takes too long: some rank has not come.

    A thread watches, for the rank itself may wait in a library; mpi4py and torch let it run meanwhile. It counts the time in which
    it was let run, as a machine that starves this rank starves those it waits for.
    """
    if place.size == 1:
        yield
        return
    seconds, done = deadline_seconds(environ, place.num_nodes), Event()

    def watch() -> None:
        waited, limit = 0.0, seconds + min(place.rank, 10) * _STAGGER
        while waited < limit:
            began = monotonic()
            if done.wait(_TICK):
                return
            waited += min(monotonic() - began, 2 * _TICK)
        give_up(
            place, f"has waited {seconds:.0f} s for {awaited}: not all of the {place.size} ranks have come; {_remedy()}", environ
        )

    watching = Thread(target=watch, daemon=True, name="deepex-start")
    watching.start()
    try:
        yield
    finally:
        done.set()


def _remedy() -> str:
    return f"the missing ones may have said why; for a start that is slow, set {SECONDS} higher"


def give_up(place: Place, message: str, environ: Mapping[str, str]) -> NoReturn:
    """Say one line and end this rank, and with it the job."""
    sys.stderr.write(f"deepex: rank {place.rank} on {place.host or socket.gethostname()}: {message}\n")
    sys.stderr.flush()
    leave_code(1, environ)
    end(1)


def end(code: int) -> NoReturn:
    """End the job as far as this rank can, at once: other threads may hang in a library."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.size > 1:
        Thread(target=lambda: mpi.COMM_WORLD.Abort(code), daemon=True).start()
        sleep(2)
    os._exit(code)


def fail(message: str, code: int, *, agreed: bool = False) -> NoReturn:
    """Print one line and end. Of ranks that all have the same error rank 0 speaks; else this one names itself, and ends the job."""
    try:
        place = find_place(os.environ)
    except DeepexError:
        place = Place()
    if place.rank > 0:
        sleep(0.5 + min(place.rank, 10) * 0.1)  # a launcher may end the others as soon as one has; let the lowest speak first
    if place.rank == 0 or not agreed:
        named = f"rank {place.rank} on {socket.gethostname()}: " if place.size > 1 and not agreed else ""
        sys.stderr.write(f"deepex: {named}{message}\n")
        sys.stderr.flush()
        leave_code(code, os.environ)
    if not agreed and running_mpi() is not None:
        end(code)
    sys.exit(code)


def _finalize(mpi: Any) -> None:
    with ending:
        if not mpi.Is_finalized():
            mpi.Finalize()
