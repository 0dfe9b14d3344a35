"""Complete runs: recipes by name, and `train`, which joins networks, data and engine.

config = recipe("fashion", {"epochs": 5, "sync.period": 16})
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from deepex.engine.config import RunConfig
from deepex.errors import UnknownName
from deepex.recipes.pictures import cifar10, fashion, fashion_cvae, fashion_resnet, imagenet, mnist
from deepex.recipes.run import resumed_config, train
from deepex.recipes.science import atomai, atomai_small, pf, pf_small
from deepex.record.table import from_table, set_values, to_table

__all__ = ["RECIPES", "recipe", "resumed_config", "train"]

RECIPES: Final[dict[str, Callable[[], RunConfig]]] = {
    "atomai": atomai,
    "atomai-small": atomai_small,
    "cifar10": cifar10,
    "fashion": fashion,
    "fashion-cvae": fashion_cvae,
    "fashion-resnet": fashion_resnet,
    "imagenet": imagenet,
    "mnist": mnist,
    "pf": pf,
    "pf-small": pf_small,
}


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of the recipe `name`, with `changes` to its keys, written with dots: {"sync.period": 16}."""
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    return from_table(RunConfig, set_values(to_table(RECIPES[name]()), changes or {}))
