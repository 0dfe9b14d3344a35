"""Real MPI ranks that stay for many tests. To start one takes three seconds of a core, which is most of what such tests cost.

    def add(comm, number):                       # of a module: the ranks import it
        return comm.allreduce(number)

    assert ranks.run(add, 5, size=3) == [15, 15, 15]

`comm` is a communicator of mpi4py for the first `size` ranks. The others sleep: they wait for work at a socket, and not in MPI,
where they would hold the cores. What goes in and what comes out is JSON. A test of launch, signals, or of what the start does has
ranks of its own (mpi.py).
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from deepex.comm.launch import launcher_prefix
from tests.mpi import HANGS, ROOT, rank_environ

NUM_RANKS: Final = 4
STACKS: Final = signal.SIGUSR2  # upon which a rank writes what each of its threads does
_OTHERS_SECONDS: Final = 2.0  # for the other ranks to answer once one has failed: they may wait for it in MPI
_STACK_SECONDS: Final = 1.0


class RanksError(AssertionError):
    """A job in which a rank raised, died, or did not end; with what each rank wrote, and where each stood."""


class RankPool:
    """Starts the ranks for the first job. After one that failed they are ended, and the next job has new ones."""

    def __init__(self, size: int = NUM_RANKS) -> None:
        self._size = size
        self._ranks: _Ranks | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 2,
        environ: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        limit_seconds: float = HANGS,
    ) -> list[Any]:
        """Call `function(comm, *arguments)` on the first `size` ranks; what each returned. `environ` holds for this job alone."""
        assert size <= self._size, f"there are {self._size} ranks"
        if self._ranks is None:
            self._ranks = _Ranks(self._size)
        name = f"{function.__module__}:{function.__qualname__}"
        job = {"function": name, "arguments": arguments, "size": size, "environ": dict(environ or {}), "cwd": cwd}
        try:
            return self._ranks.work(json.dumps(job, default=os.fspath), size, limit_seconds)
        except BaseException:  # ended, whatever it was: no answer may come to the next job
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None


class _Ranks:
    """The processes of one launch."""

    def __init__(self, size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._folder / "socket"))
            door.listen(size)
            door.settimeout(HANGS)
            self._process = self._launch(size)
            callers = [self._answer_call(door) for _ in range(size)]
        self._lines = [line for _, _, line in sorted(callers, key=lambda caller: caller[0])]
        self._processes = [process for _, process, _ in sorted(callers, key=lambda caller: caller[0])]

    def _launch(self, size: int) -> subprocess.Popen[bytes]:
        prefix, extra = launcher_prefix(size)
        command = [*prefix, sys.executable, "-m", "tests.pool_rank", str(self._folder)]
        with (self._folder / "launcher").open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=rank_environ(**extra), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                process_group=0, preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only calls the kernel
            )  # fmt: skip

    def _answer_call(self, door: socket.socket) -> tuple[int, int, socket.socket]:
        try:
            line, _ = door.accept()
        except TimeoutError:
            self.end()
            raise RanksError("the ranks did not start") from None
        hello = json.loads(_read_line(line))
        return hello["rank"], hello["process"], line

    def work(self, job: str, size: int, limit_seconds: float) -> list[Any]:
        for line in self._lines[:size]:
            line.sendall(job.encode() + b"\n")
        answers = self._answers(size, limit_seconds)
        wrong = {rank: answers.get(rank, {}).get("error", "no answer") for rank in range(size)}
        if any(wrong.values()):
            raise RanksError(self._story(job, {rank: error for rank, error in wrong.items() if error}))
        return [answers[rank]["value"] for rank in range(size)]

    def _answers(self, size: int, limit_seconds: float) -> dict[int, dict[str, Any]]:
        """By rank; those that are lost, or come too late, are not there."""
        answers: dict[int, dict[str, Any]] = {}
        waiting, end = {self._lines[rank].fileno(): rank for rank in range(size)}, time.monotonic() + limit_seconds
        while waiting and time.monotonic() < end:
            for number in select.select([*waiting], [], [], max(0.0, end - time.monotonic()))[0]:
                rank = waiting.pop(number)
                text = _read_line(self._lines[rank])
                answers[rank] = json.loads(text) if text else {"error": "the process has ended"}
                if answers[rank]["error"]:
                    end = min(end, time.monotonic() + _OTHERS_SECONDS)
        return answers

    def _story(self, job: str, wrong: dict[int, str]) -> str:
        """What went wrong, with everything that was written; ranks that have not answered say where they stand."""
        for rank, error in wrong.items():
            if error == "no answer":
                os.kill(self._processes[rank], STACKS)
        time.sleep(_STACK_SECONDS)
        parts = [f"rank {rank}: {error}" for rank, error in wrong.items()]
        written = [*sorted(self._folder.glob("rank*")), self._folder / "launcher"]
        texts = [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in written]
        return "\n".join([job, *parts, *(f"--- {name} wrote\n{text}" for name, text in texts if text)])

    def end(self) -> None:
        """A rank that sleeps ends by itself when its line does; one that does not, is made to."""
        for line in getattr(self, "_lines", []):
            line.close()
        try:
            self._process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGTERM)  # mpiexec ends its ranks
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for process in getattr(self, "_processes", []):
            _kill(process)
        shutil.rmtree(self._folder, ignore_errors=True)


def _read_line(line: socket.socket) -> bytes:
    """What a rank has to say is one line at a time; empty if it has ended."""
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(1 << 20)
        if not part:
            return b""
        text += part
    return text


def _kill(process: int) -> None:
    """End a rank that outlived its launcher."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        if b"tests.pool_rank" in words:
            os.kill(process, signal.SIGKILL)
    except OSError:
        pass


def _end_with_parent() -> None:
    """In mpiexec: the end of the tests is the end of their ranks, however it comes."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
