"""How weights are updated from their gradients: the optimisers, one file each."""

from typing import Any, Final

from deepex.arena.arena import Arena
from deepex.arena.optimiser.base import Optimiser
from deepex.record.options import Options, load_kinds, options_in

OPTIMISERS: Final = ["sgd", "lars"]


def optimisers() -> dict[str, type[Optimiser]]:
    """Every optimiser by its name in `optim.method`."""
    return {module.KIND.name: module.KIND for module in load_kinds(__name__, OPTIMISERS)}


def optimiser_options() -> tuple[type[Options], ...]:
    """What the optimisers declare in `optim.*`."""
    return tuple(kind for module in load_kinds(__name__, OPTIMISERS) for kind in options_in(module))


def make_optimiser(config: Any, arena: Arena) -> Optimiser:
    """Build what the OptimConfig says, for an arena with its states."""
    return optimisers()[config.method](config, arena)
