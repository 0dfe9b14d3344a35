"""A rank of the pool: `mpiexec -n 4 python -m tests.pool_rank FOLDER`. It sleeps at the socket there until it gets a job."""

import faulthandler
import gc
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from deepex.comm.library import start_mpi
from deepex.machine.heap import loading
from tests.leaks import State
from tests.pool import STACKS


def main(folder: Path) -> None:
    """Work until the line is closed. The first job that needs torch loads it: after MPI, as in every program of ranks."""
    world, groups = start_mpi().COMM_WORLD, {}
    faulthandler.register(STACKS, all_threads=True)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(folder / "socket"))
        _send(line, {"rank": world.rank, "process": os.getpid()})
        for text in line.makefile("r", encoding="utf-8"):
            job = json.loads(text)
            size = job["size"]
            if size not in groups:
                groups[size] = world.Create_group(world.group.Incl(range(size)), tag=size)  # the others know nothing of it
            _send(line, _work(job, groups[size], folder / f"rank{world.rank}"))


def _send(line: socket.socket, value: dict[str, Any]) -> None:
    line.sendall(json.dumps(value).encode() + b"\n")


def _work(job: dict[str, Any], comm: Any, output: Path) -> dict[str, Any]:
    """Do a job; its result, or what went wrong."""
    answer = {"value": None, "error": ""}
    with _written_to(output):
        try:
            module, _, name = job["function"].partition(":")
            with loading() if module not in sys.modules else nullcontext():
                function = getattr(importlib.import_module(module), name)
            before = State()
            os.environ.update(job["environ"])
            os.chdir(job["cwd"])
            try:
                answer["value"] = function(comm, *job["arguments"])
                json.dumps(answer)
            finally:
                before.put_back()
            if leaks := before.leaks():
                answer["error"] = f"the job is done, but it left behind {', '.join(leaks)}"
        except BaseException:  # noqa: BLE001 - whatever it is, it is the verdict
            answer = {"value": None, "error": traceback.format_exc()}
    gc.collect()  # an error holds the frames that it came through, and these hold communicators
    return answer


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    """Let a file have what this process writes, by whatever means; not what it wrote in the job before."""
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, one in zip((1, 2), kept, strict=True):
            os.dup2(one, number)
            os.close(one)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
