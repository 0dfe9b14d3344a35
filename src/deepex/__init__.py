"""DeepEx: train deep networks natively on HPC machines, and measure what parallel training really gains.

    import deepex
    config = deepex.recipe("fashion", {"epochs": 5, "sync.period": 16})
    run = deepex.train(config, comm=comm, out="runs/a")      # comm: any mpi4py communicator, or None for all ranks

Importing this is instant: names are resolved, and torch is loaded, on first use; on ranks of a launcher the MPI library before it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepex.recipes import recipe, train
    from deepex.record import RunDirectory
    from deepex.training.config import RunConfig

__all__ = ["RunConfig", "RunDirectory", "recipe", "train"]

_HOMES = {
    "RunConfig": "deepex.training.config",
    "RunDirectory": "deepex.record",
    "recipe": "deepex.recipes",
    "train": "deepex.recipes",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import_module("deepex.comm.early").load_mpi()  # before torch, which comes with most of these names
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'deepex' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
