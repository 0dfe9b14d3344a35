"""Optimisers over syncs, one file each."""

from typing import Final

from deepex.record.options import load_kinds
from deepex.sync.outer.outer_step import OuterStep
from deepex.sync.synced_slice import SyncedSlice

STEPS: Final = ["slowmo", "nesterov", "adam", "trust", "muon"]


def outer_steps() -> dict[str, type[OuterStep]]:
    """Every optimiser by its name in `sync.outer`."""
    return {module.KIND.name: module.KIND for module in load_kinds(__name__, STEPS)}


def make_outer(name: str, synced: SyncedSlice, *, rate: float, momentum: float, peak: float) -> OuterStep:
    """Build one; a rate or momentum of 0 is the usual one. `peak` is the highest rate of the replicas."""
    kind = outer_steps()[name]
    usual_rate, usual_momentum = kind.usual
    return kind(synced, rate=rate or usual_rate, momentum=momentum or usual_momentum, peak=peak)
