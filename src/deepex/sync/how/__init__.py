"""How replicas agree: the strategies, one file each."""

from typing import Final

from deepex.record.options import Options, load_kinds, options_in
from deepex.sync.how.strategy import Strategy

STRATEGIES: Final = ["weights", "gradients", "hierarchical", "background", "elastic", "streaming", "auto"]


def strategies() -> dict[str, Strategy]:
    """Every strategy by its name in `sync.strategy`."""
    return {kind.name: kind() for kind in (module.KIND for module in load_kinds(__name__, STRATEGIES))}


def strategy_options() -> tuple[type[Options], ...]:
    """What the strategies declare in `sync.*`."""
    return tuple(kind for module in load_kinds(__name__, STRATEGIES) for kind in options_in(module))
