"""Jobs for the tests of the pool: what ranks do wrong. Without torch, so that ranks that die of them are cheap."""

import os
import signal
import threading
import time
from typing import Any

from tests import mpi


def add(comm: Any, number: int) -> int:
    total: int = comm.allreduce(number + comm.rank)
    return total


def identify(comm: Any) -> int:
    return os.getpid()


def raise_on(comm: Any, rank: int) -> None:
    print(f"rank {comm.rank} was here", flush=True)
    if comm.rank == rank:
        raise ValueError("made up")
    comm.barrier()


def hang(comm: Any) -> None:
    if comm.rank == 1:
        time.sleep(1000)
    comm.barrier()


def die(comm: Any) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def leave_a_thread_and_another_function(comm: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="forgotten").start()
    mpi.own_lines = lambda _text: []


def disturb(comm: Any, folder: str) -> str | None:
    """Change what can be put back; the value of a variable that the job was given."""
    import torch

    os.chdir(folder)
    os.environ["MADE_UP"] = "1"
    os.umask(0o077)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.manual_seed(1234)
    return os.environ.get("GIVEN")


def look(comm: Any) -> list[Any]:
    import torch

    mask = os.umask(0)
    os.umask(mask)
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    given = [os.environ.get(name) for name in ("MADE_UP", "GIVEN")]
    return [os.getcwd(), *given, mask, default, torch.get_num_threads(), torch.initial_seed()]
