"""`sync=auto` on ranks whose network is slow: a job of the pool, which tells how replicas agreed and what was summed last."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from time import sleep
from typing import Any
from unittest.mock import PropertyMock, patch

import deepex
from deepex.comm import Call, WrappedCommunicator, as_communicator
from deepex.comm.base import own_zeros
from deepex.comm.mpi import MpiCommunicator
from deepex.step.eager import EagerStep

SECONDS_PER_NUMBER = 30e-6
SECONDS_PER_STEP = 2e-3  # as told: what else the machine does must not make steps as long as sums


class Slow:
    """A hook that makes sums take longer, the longer the more is summed; the length of the last of this thread, and of another."""

    def __init__(self) -> None:
        self.last = [0, 0]

    @contextmanager
    def __call__(self, call: Call) -> Iterator[None]:
        yield
        if call.what == "sum":
            count = call.arguments[0].numel()
            self.last[current_thread() is not main_thread()] = count
            sleep(SECONDS_PER_NUMBER * count)


def train_slowly(comm: Any, data: str, out: str, overlaps: bool) -> dict[str, Any]:
    """With `overlaps` False, as where MPI was started for one thread."""
    changes = {
        "data": data,
        "net": "tests.networks:normed",
        "batch": 4,
        "epochs": 2,
        "threads": 1,
        "sync": "auto",
        "layout": "contiguous",
    }
    hook, ours = Slow(), as_communicator(comm)
    told = patch.object(MpiCommunicator, "overlaps", new_callable=PropertyMock, return_value=overlaps)
    apart = patch.object(
        MpiCommunicator, "zeros", lambda _comm, *what: own_zeros(*what)
    )  # memory that is not shared, as on two nodes
    with told, apart, patch.object(EagerStep, "trial_seconds", return_value=SECONDS_PER_STEP):
        run = deepex.train(deepex.recipe("fashion", changes), WrappedCommunicator(ours, hook), out=Path(out))
    ours.close()
    state, period = run.state["sync"], run.epochs()[0].period
    return {"chosen": run.config["sync"]["strategy"], "reason": state["reason"], "period": period, "last": hook.last}
