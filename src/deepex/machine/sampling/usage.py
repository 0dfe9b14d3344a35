"""What each rank used, as a row of numbers that ranks tell each other, and as `EpochRecord.usage`.

    row = to_row(sampler.take(), first=True, gpu=None)
    usage_of([row, …])["cpu_seconds"]["forward"]        # one number per rank

All rows have one length, whatever a rank can measure. What a rank cannot measure is not a number in its row, and then a resource is
left out for all of them: a sum over some of the ranks would pass for that of all. What concerns a node is measured by its first
rank, and zero on the others.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Final

from deepex.machine.sampling.ledger import EPOCH, OTHER, Used
from deepex.machine.sampling.source import COUNTERS, LEVELS, NODE_WIDE
from deepex.record.clock import PHASES

Usage = dict[str, dict[str, list[float]]]

_PLACES: Final = (*PHASES, OTHER, EPOCH)
_COLUMNS: Final = (*((name, place) for name in COUNTERS for place in _PLACES), *((name, EPOCH) for name in LEVELS))
_GPU: Final = len(_COLUMNS)  # the last number tells which GPU it was: ranks may share one
LENGTH: Final = len(_COLUMNS) + 1
NOTHING: Final = (math.nan,) * LENGTH


def to_row(used: Used, *, first: bool, gpu: str | None) -> list[float]:
    """The row of a rank; `first` of its node, on the GPU with that identifier."""
    zeros = dict.fromkeys((*PHASES, OTHER) if used.by_phase else (EPOCH,), 0.0)
    found = {**({} if first else dict.fromkeys(NODE_WIDE, zeros)), **used.amounts}
    found |= {name: {EPOCH: level} for name, level in used.peaks.items()}
    numbers = [found.get(name, {}).get(place, math.nan) for name, place in _COLUMNS]
    return [*numbers, math.nan if gpu is None else _number(gpu)]


def usage_of(rows: Sequence[Sequence[float]]) -> Usage:
    """The usage of all ranks. `joules` is all that is known of energy; `cpu_joules` and `gpu_joules` tell of what."""
    usage: Usage = {}
    for column, (name, place) in enumerate(_COLUMNS):
        values = [row[column] for row in rows]
        if name == "gpu_joules":
            values = _once(values, [row[_GPU] for row in rows])
        if not any(math.isnan(value) for value in values):
            usage.setdefault(name, {})[place] = [_short(value) for value in values]
    parts = [usage[name] for name in ("cpu_joules", "gpu_joules") if name in usage]
    if parts:
        usage["joules"] = {
            place: [_short(sum(of)) for of in zip(*(part[place] for part in parts), strict=True)] for place in parts[0]
        }
    return usage


def _once(values: list[float], gpus: list[float]) -> list[float]:
    """A GPU that ranks share counts for the first of them."""
    return [0.0 if gpu in gpus[:rank] else value for rank, (value, gpu) in enumerate(zip(values, gpus, strict=True))]


def _number(gpu: str) -> float:
    """A number that a float holds exactly, for an identifier."""
    return float(int(hashlib.sha256(gpu.encode()).hexdigest()[:12], 16))


def _short(value: float) -> float:
    """Six digits: a record has thousands of them."""
    return float(f"{value:.6g}")
