"""Which of some settings is fastest here, by steps of each in turns; all ranks decide alike.

best = fastest({True: step_with, False: step_without}, comm)
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, TypeVar

from deepex.comm import Communicator

_SECONDS: Final = 2.0
_LEAST, _MOST = 3, 20  # rounds, after one of warm-up

T = TypeVar("T")


def fastest(steps: Mapping[T, Callable[[], None]], comm: Communicator) -> T:
    """Time steps in turns, so that a busy moment of the machine hits all; the slowest rank's best time counts. Collective."""
    if len(steps) == 1:
        return next(iter(steps))
    for step in steps.values():
        step()
    best, began = dict.fromkeys(steps, float("inf")), perf_counter()
    for rounds in range(1, _MOST + 1):
        for name, step in steps.items():
            start = perf_counter()
            step()
            best[name] = min(best[name], perf_counter() - start)
        if comm.gather(rounds >= _LEAST and perf_counter() - began > _SECONDS)[0]:
            break
    found = comm.gather(list(best.values()))
    slowest = [max(column) for column in zip(*found, strict=True)]
    return list(steps)[slowest.index(min(slowest))]
