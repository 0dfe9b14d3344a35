"""The start of a job: MPI first, and what ranks must agree on before anything is built.

    start = Start.begin(os.environ)                      # before torch is loaded; MPI is up then, if it carries the job
    config = start.agree(lambda: read_config(path))      # what one rank fails with, all raise

mpi4py comes before torch, as centres with several MPIs advise: the libraries of both may be one. Nothing here loads torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Final, TypeVar

from deepex.comm.deadline import STAGGER, TICK, deadline, give_up, remedy
from deepex.comm.joining import deadline_seconds, note
from deepex.comm.launch import end_with_parent
from deepex.comm.library import check_size, start_mpi
from deepex.comm.place import Place, find_place
from deepex.comm.same import as_texts, difference
from deepex.comm.together import rebuilt
from deepex.errors import DeepexError, FailureError

T = TypeVar("T")

WITHOUT_MPI: Final = ("torchrun", "environment", "none")  # launchers whose ranks join through torch.distributed

_LONGEST_MESSAGE: Final = 4000  # characters
_LONGEST_WORD: Final = 1 << 18  # bytes, in which a message and a configuration have room
_TAG: Final = 7071


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
        end_with_parent(environ)
        by_address = place.launcher == "slurm" and "MASTER_ADDR" in environ  # srun may join them by that alone
        if place.size == 1 or place.launcher in WITHOUT_MPI or by_address:
            return cls(place)
        with deadline("MPI to start", place, environ):
            mpi = start_mpi()
            check_size(place, mpi.COMM_WORLD.size)
            return cls(place, tuple(mpi.COMM_WORLD.allgather(place.host)))

    def agree(
        self, work: Callable[[], T], environ: Mapping[str, str], same: Callable[[T], Mapping[str, object]] = lambda _: {}
    ) -> T:
        """Run `work` on every rank, without communication in it; if it fails anywhere, raise that error everywhere.

        What `same` makes of the result must not differ between ranks. Where no MPI carries the job, each rank is on its own until
        it has a communicator.
        """
        if not self.hosts:
            return work()
        error: DeepexError | None = None
        result: list[T] = []
        try:
            result.append(work())
        except (Exception, SystemExit) as caught:
            if "DEEPEX_DEBUG" in environ and not isinstance(caught, DeepexError):
                raise
            error = caught if isinstance(caught, DeepexError) else FailureError(f"{type(caught).__name__}: {caught}")
        facts = as_texts(same(result[0])) if result else {}
        verdict = self._tell(_Word(error, facts), deadline_seconds(environ, self.place.num_nodes), environ)
        if verdict is not None:
            agreed = rebuilt(*verdict)
            agreed.agreed = True
            raise agreed from error
        return result[0]

    def _tell(self, word: "_Word", seconds: float, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Tell rank 0 whether this one failed, and hear whether any did. Rank 0 asks each, so it knows who is missing."""
        world = start_mpi().COMM_WORLD
        if world.rank:
            world.isend(word.sent, 0, _TAG)
            patience = seconds + 2 + min(world.rank, 10) * STAGGER
            heard: tuple[str, str] | None
            heard = self._await({0: world.irecv(_LONGEST_WORD, 0, _TAG)}, patience, word.message, environ)[0]
            return heard
        requests = {rank: world.irecv(_LONGEST_WORD, rank, _TAG) for rank in range(1, world.size)}
        words = self._await(requests, seconds, word.message, environ)
        verdict = _verdict({0: word.sent, **words}, self.hosts)
        for sent in [world.isend(verdict, rank, _TAG) for rank in range(1, world.size)]:
            sent.wait()
        return verdict

    def _await(self, requests: dict[int, Any], seconds: float, own: str, environ: Mapping[str, str]) -> dict[int, Any]:
        """Wait for words of other ranks; `own` is the error of this one, if it has any: it may be why they do not come."""
        words, waited, pause = {}, 0.0, 1e-4
        while requests:
            for rank in list(requests):
                done, word = requests[rank].test()
                if done:
                    words[rank] = word
                    del requests[rank]
            if waited > seconds:
                others = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in list(requests)[:8])
                give_up(self.place, own or f"{others} has not answered for {seconds:.0f} s; {remedy()}", environ)
            began = monotonic()
            sleep(pause)
            waited += min(monotonic() - began, 2 * TICK)
            pause = min(2 * pause, 0.01)
        return words


@dataclass(frozen=True)
class _Word:
    """What a rank tells before it has a communicator: its error, if it has one, and what all must have the same."""

    error: DeepexError | None
    facts: dict[str, str]

    @property
    def message(self) -> str:
        return "" if self.error is None else str(self.error)[:_LONGEST_MESSAGE]

    @property
    def sent(self) -> tuple[str, str, dict[str, str]]:
        return "" if self.error is None else type(self.error).__name__, self.message, self.facts


def _verdict(words: Mapping[int, tuple[str, str, dict[str, str]]], hosts: tuple[str, ...]) -> tuple[str, str] | None:
    """The error of the lowest rank that has one; with its name, unless all have the same. Else what they differ in."""
    failed = {rank: (kind, message) for rank, (kind, message, _) in words.items() if kind}
    if not failed:
        differs = difference([(hosts[rank], words[rank][2]) for rank in range(len(hosts))])
        return ("ConfigError", differs) if differs else None
    rank = min(failed)
    kind, message = failed[rank]
    alike = len(failed) == len(hosts) and len({*failed.values()}) == 1
    return kind, message if alike else f"rank {rank} on {hosts[rank]}: {message}"
