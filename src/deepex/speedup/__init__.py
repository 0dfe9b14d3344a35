"""Per-epoch speedup, efficiency and learning speedup: pure functions of records. No torch, no MPI."""

from deepex.speedup.measure import Speedup, compare, epoch_seconds

__all__ = ["Speedup", "compare", "epoch_seconds"]
