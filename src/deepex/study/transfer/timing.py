"""Timing an operation that several ranks do together, again and again.

    timing = Timing(seconds=0.3, repeats=5)
    seconds, runs = timing.time(comm, lambda: comm.sum(tensor), settle=torch.cuda.synchronize)

A barrier comes before each repeat, and the slowest rank's time counts. How often the operation runs in a repeat is found by trying,
which also warms up caches and connections; the ranks decide alike, as they decide by the same times. What Python takes to make the
call, below a microsecond, is part of what is measured, as it is of a training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from deepex.comm import Communicator
from deepex.errors import ConfigError

_MOST_RUNS: Final = 1 << 20
_TRIED_SHARE: Final = 0.25  # of a repeat's time: a trial that took as long tells how often to run


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How a point is measured: `repeats` times, in about `seconds` altogether."""

    seconds: float = 0.3
    repeats: int = 5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"--seconds is {self.seconds}; it must be above 0, for example 0.3")
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}; it must be at least 1, for example 5")

    def time(self, comm: Communicator, operation: Callable[[], object], settle: Callable[[], object]) -> tuple[list[float], int]:
        """Seconds of one operation in each repeat, and how often it ran in each. `settle` waits for what it left on a device."""
        share, runs = self.seconds / self.repeats, 1
        _run(comm, operation, settle, 1)
        while (elapsed := _run(comm, operation, settle, runs)) < _TRIED_SHARE * share and runs < _MOST_RUNS:
            runs *= 4
        runs = min(_MOST_RUNS, max(1, round(runs * share / elapsed)))
        return [_run(comm, operation, settle, runs) / runs for _ in range(self.repeats)], runs


def _run(comm: Communicator, operation: Callable[[], object], settle: Callable[[], object], runs: int) -> float:
    settle()
    comm.barrier()
    began = perf_counter()
    for _ in range(runs):
        operation()
    settle()
    elapsed = perf_counter() - began
    return float(comm.gather_rows(torch.tensor([elapsed], dtype=torch.float64)).max())
