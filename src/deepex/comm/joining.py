"""Ranks that are about to find each other, as their launcher sees them: each notes in a folder how far it is.

    note(os.environ, "started", rank)         # a rank; later "connected"
    joining = Joining(folder, 4, deadline_seconds(os.environ))      # the launcher
    while not joining.done():
        joining.wait(0.1)
        problem = joining.problem(find_processes)   # a sentence, if one of them has vanished or never began

A rank that vanishes leaves the others waiting, whatever its exit code, and mpiexec does not always notice.
"""

import os
import select
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from deepex.errors import ConfigError

SECONDS: Final = "DEEPEX_START_SECONDS"  # the variable that says how long the start may take
FOLDER: Final = "DEEPEX_LAUNCH_FOLDER"  # the variable that tells ranks of our launcher where to note how far they are
CODE: Final = "code"  # the file in it in which a rank that has said why the job fails leaves its exit code

_GRACE_SECONDS: Final = 2.0  # for a rank that has failed to say why, and for mpiexec to end the others
_SECONDS: Final = 20.0  # that ranks of one node wait for each other; those of a large job come one after another
_SECONDS_PER_NODE: Final = 0.5
_MOST_SECONDS: Final = 600.0


def deadline_seconds(environ: Mapping[str, str], num_nodes: int = 1) -> float:
    """How long ranks wait for each other when they start."""
    told = environ.get(SECONDS)
    if told is None:
        return min(_SECONDS + _SECONDS_PER_NODE * num_nodes, _MOST_SECONDS)
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{SECONDS} is {told!r}; it must be a number of seconds above 0, as 20: correct it, or unset it")
    return seconds


def note(environ: Mapping[str, str], what: str, rank: int) -> None:
    """Note for the launcher, if it is ours, that this rank is as far as `what`."""
    if FOLDER in environ:
        with suppress(OSError):
            (Path(environ[FOLDER]) / f"{what}-{rank}").write_text(str(os.getpid()), encoding="ascii")


class Joining:
    """What `ranks` processes have noted in `folder`, and in which order they ended."""

    def __init__(self, folder: Path, ranks: int, seconds: float) -> None:
        self._folder, self._ranks, self._seconds = folder, ranks, seconds
        self._poll, self._watched = select.poll(), dict[int, int]()  # a process's descriptor, and the rank that it is
        self._ended: list[int] = []
        self._first: list[int] = []  # which ended before the others: several, if they did between two looks
        self._began: float | None = None
        self._missed: float | None = None

    def done(self) -> bool:
        """Whether all are connected."""
        return len(self._noted("connected")) == self._ranks

    def wait(self, seconds: float) -> None:
        """Wait until one of them ends, but not longer than this."""
        for rank, process in self._noted("started").items():
            if rank in self._watched.values() or rank in self._ended:
                continue
            try:
                descriptor = os.pidfd_open(process)
            except OSError:  # it has ended since
                self._note_ended([rank])
                continue
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)
        if not self._watched:
            sleep(seconds)
        descriptors = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)] if self._watched else []
        for descriptor in descriptors:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._note_ended([self._watched.pop(descriptor) for descriptor in descriptors])

    def close(self) -> None:
        """Release the processes' descriptors."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    def problem(self, running: Callable[[], Collection[int]]) -> str | None:
        """What keeps the ranks from each other, if anything does; empty if one of them has told it.

        `running` finds the processes that have not ended, noted or not; it is asked while some are not noted.
        """
        started = self._noted("started")
        if not started:
            return None
        self._began = self._began or monotonic()
        absent = len(started) < self._ranks
        late = absent and monotonic() - self._began > self._seconds
        if not (self._ended or self._told() or late or (absent and len(running()) < self._ranks)):
            self._missed = None
            return None
        self._missed = self._missed or monotonic()
        if monotonic() - self._missed < _GRACE_SECONDS or self.done():
            return None
        return "" if self._told() else self.sentence()

    def sentence(self) -> str:
        """Say which rank did not come; empty if one of them has told why."""
        self.wait(0)
        absent = {*range(self._ranks)} - {*self._noted("started")}
        ranks = sorted({*self._first} | absent)
        named = f"rank {' or '.join(map(str, ranks[:8]))}" if ranks else "a rank"
        how = "ended at once, or never began," if absent else "ended"
        where = f"{named} on {socket.gethostname()}"
        return "" if self._told() else f"{where} {how} before the {self._ranks} ranks had found each other, and did not say why"

    def _note_ended(self, ranks: list[int]) -> None:
        self._first = self._first or ranks
        self._ended += ranks

    def _told(self) -> bool:
        return (self._folder / CODE).exists()

    def _noted(self, what: str) -> dict[int, int]:
        found = {}
        for path in self._folder.glob(f"{what}-*"):
            with suppress(OSError, ValueError):
                found[int(path.name.rpartition("-")[2])] = int(path.read_text(encoding="ascii"))
        return found
