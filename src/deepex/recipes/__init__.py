"""Complete runs: recipes by name, and `train`, which joins networks, data and training.

config = recipe("fashion", {"epochs": 5, "sync.period": 16})
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from deepex.errors import ConfigError, UnknownName
from deepex.recipes.network import build_network
from deepex.recipes.pictures import cifar10, fashion, fashion_cvae, fashion_resnet, imagenet, mnist
from deepex.recipes.science import atomai, atomai_small, pf, pf_small
from deepex.record import RunDirectory
from deepex.record.table import from_table, load_toml, set_values, to_table
from deepex.training.config import RunConfig
from deepex.training.resume import resumed_config
from deepex.training.run import run_training
from deepex.training.watch import Watcher

__all__ = ["RECIPES", "find_config", "recipe", "resumed_config", "train"]

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


def find_config(name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a recipe or, if `name` looks like a path, of a TOML file, with `changes` to its keys."""
    if not (name.endswith(".toml") or "/" in name):
        return recipe(name, changes)
    if not Path(name).is_file():
        raise ConfigError(f"{name} does not exist; give a TOML file, or a recipe's name from `deepex train --list`")
    return from_table(RunConfig, set_values(load_toml(Path(name)), changes or {}))


def train(
    config: RunConfig,
    comm: Any = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> RunDirectory:
    """Train what `config` says on the ranks of `comm`, and give back the run directory `out`.

    Collective over `comm`: any mpi4py communicator, a split one too; ranks outside it are not touched. None takes all ranks that
    the launcher started. `resume` continues the run in `out`. A mistake that can be mended is raised on every rank; a rank that
    fails in the middle takes the job down (MPI_Abort), because the others would wait for it forever.
    """
    return run_training(config, comm, build_network, out=out, resume=resume, watcher=watcher)
