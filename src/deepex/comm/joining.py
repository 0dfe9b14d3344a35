"""Ranks as their launcher sees them: each notes in a folder that it has started, is connected, and has ended well.

    joining = Joining(folder, 4, deadline_seconds(os.environ))      # the launcher, before it starts them
    note(os.environ, "started", rank)                               # a rank; later "connected" and "ended"
    while not joining.done():
        joining.wait(0.1)
        problem = joining.problem(find_processes)   # a sentence, if one of them has vanished or never began

A rank that vanishes leaves the others waiting, whatever its exit code, and mpiexec does not always notice; and where one ends with
code 0 in the middle, MPICH's calls the job well done.
"""

import os
import select
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from deepex.errors import ConfigError, StorageError

SECONDS: Final = "DEEPEX_START_SECONDS"  # the variable that says how long the start may take
FOLDER: Final = "DEEPEX_LAUNCH_FOLDER"  # the variable that tells ranks of our launcher where to note how far they are
CODE: Final = "code"  # the file in it in which a rank that has said why the job fails leaves its exit code

_STAGES: Final = ("started", "connected", "ended")
_NOTE_BYTES: Final = 16  # of each rank: its process, in digits. There from the beginning, so that no disk is too full for it
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


def note(environ: Mapping[str, str], stage: str, rank: int) -> None:
    """Note for the launcher, if it is ours, that this rank has come to a stage."""
    if FOLDER in environ:
        with suppress(OSError):
            file = os.open(Path(environ[FOLDER]) / stage, os.O_WRONLY)
            try:
                os.pwrite(file, str(os.getpid()).encode(), rank * _NOTE_BYTES)
            finally:
                os.close(file)


class Joining:
    """What `ranks` processes have noted in `folder`, and in which order they ended."""

    def __init__(self, folder: Path, ranks: int, seconds: float) -> None:
        self._folder, self._ranks, self._seconds = folder, ranks, seconds
        self._poll, self._watched = select.poll(), dict[int, int]()  # a process's descriptor, and the rank that it is
        self._unwatched: dict[int, int] = {}  # the process of a rank, where the system has no descriptors of processes
        self._first: list[int] = []  # which ended before the others: several, if they did between two looks
        self._ended: set[int] = set()
        self._began: float | None = None
        self._missed: float | None = None
        try:
            for stage in _STAGES:
                (folder / stage).write_bytes(b" " * (ranks * _NOTE_BYTES))
        except OSError as error:
            raise StorageError(f"cannot write in {folder}: {error.strerror}; set TMPDIR to a directory that has room") from error

    def done(self) -> bool:
        """Whether all are connected."""
        return len(self._noted("connected")) == self._ranks

    def all_ended(self) -> bool:
        """Whether all have started, and none runs any more."""
        return len(self._ended) == self._ranks

    def wait(self, seconds: float) -> None:
        """Wait until one of them ends, but not longer than this."""
        for rank, process in self._noted("started").items():
            if rank not in self._ended and rank not in self._unwatched and rank not in self._watched.values():
                self._watch(rank, process)
        if not self._watched:
            sleep(seconds)
        descriptors = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)] if self._watched else []
        for descriptor in descriptors:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        gone = [rank for rank, process in self._unwatched.items() if not Path(f"/proc/{process}").exists()]
        for rank in gone:
            del self._unwatched[rank]
        self._note_ended([*gone, *(self._watched.pop(descriptor) for descriptor in descriptors)])

    def close(self) -> None:
        """Release the processes' descriptors."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    def processes(self) -> list[int]:
        """The processes of the ranks that have started and run still."""
        return [process for rank, process in self._noted("started").items() if rank not in self._ended]

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
        if not (self._ended or self.told() or late or (absent and len(running()) < self._ranks)):
            self._missed = None
            return None
        self._missed = self._missed or monotonic()
        if monotonic() - self._missed < _GRACE_SECONDS or self.done():
            return None
        return self.sentence()

    def sentence(self, code: int | None = None) -> str:
        """Say which rank ended without a word; empty if one of them has told why, or if all have ended well with `code` 0."""
        self.wait(0)
        absent = {*range(self._ranks)} - {*self._noted("started")}
        unwell = {*range(self._ranks)} - {*self._noted("ended")}
        if self.told() or (code == 0 and not unwell):
            return ""
        ranks = sorted(({*self._first} & unwell or unwell) | absent) if self.done() else sorted({*self._first} | absent)
        named = f"rank {' or '.join(map(str, ranks[:8]))}" if ranks else "a rank"
        how = "ended at once, or never began," if absent else "ended"
        when = "in the middle" if self.done() else f"before the {self._ranks} ranks had found each other"
        by = f" (the launcher's code is {code})" if code else ""
        remedy = "; a run that had begun continues with --resume RUN" if self.done() else ""
        return f"{named} on {socket.gethostname()} {how} {when}, and did not say why{by}{remedy}"

    def told(self) -> bool:
        """Whether a rank has said why the job fails."""
        return (self._folder / CODE).exists()

    def _watch(self, rank: int, process: int) -> None:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:  # it has ended since
            self._note_ended([rank])
        except (AttributeError, OSError):  # an older system, or one that does not let us
            self._unwatched[rank] = process
        else:
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def _note_ended(self, ranks: list[int]) -> None:
        self._first = self._first or ranks
        self._ended.update(ranks)

    def _noted(self, stage: str) -> dict[int, int]:
        with suppress(OSError):
            notes = (self._folder / stage).read_bytes()
            texts = (notes[rank * _NOTE_BYTES : (rank + 1) * _NOTE_BYTES].strip() for rank in range(self._ranks))
            return {rank: int(text) for rank, text in enumerate(texts) if text}
        return {}
