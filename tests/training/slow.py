"""`sync=auto` on ranks whose network is slow: a program for each, which prints how replicas agreed and what was summed last.

python -m tests.training.slow DATA OUT THREAD_LEVEL
"""

import sys
from pathlib import Path
from time import sleep
from unittest.mock import patch

import torch
from typing_extensions import override

import deepex
from deepex.comm import Communicator, connect
from deepex.comm.library import start_mpi
from deepex.step.eager import EagerStep
from tests.comm.background_contract import Wrapping

SECONDS_PER_NUMBER = 30e-6
SECONDS_PER_STEP = 2e-3  # as told: what else the machine does must not make steps as long as sums


class Slow(Wrapping):
    """A real communicator whose sums take longer, the longer the more is summed. Its memory is not shared."""

    last = 0
    thread: "Slow | None" = None

    @property
    @override
    def overlaps(self) -> bool:
        return self._inner.overlaps

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        super().sum(tensor, weight)
        self.last = tensor.numel()
        sleep(SECONDS_PER_NUMBER * self.last)

    @override
    def for_thread(self) -> Communicator:
        self.thread = Slow(self._inner.for_thread())
        return self.thread


def main(data: str, out: str, thread_level: str) -> None:
    start_mpi(thread_level)
    comm = connect("mpi")
    changes = {
        "data": data,
        "net": "tests.networks:normed",
        "batch": 4,
        "epochs": 2,
        "threads": 1,
        "sync": "auto",
        "layout": "contiguous",
    }
    slow = Slow(comm)
    with patch.object(EagerStep, "trial_seconds", return_value=SECONDS_PER_STEP):
        run = deepex.train(deepex.recipe("fashion", changes), slow, out=Path(out))
    if comm.rank == 0:
        sums = f"{slow.last} {slow.thread.last if slow.thread else 0}"
        print(run.config["sync"]["strategy"], run.state["sync"]["reason"], run.epochs()[0].period, sums, sep="\n")
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
