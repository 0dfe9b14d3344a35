"""What a user would take instead of DeepEx, each at its best: the same network, samples, batch and optimiser; one file for each.

    for name, found in available().items():
        print(name, found.version or found.reason)
    command = ["-P", "-m", "deepex.study.frameworks", "pytorch", "run.toml", "--out", "runs/pytorch"]
    launch(2, [sys.executable, *command], environ)

`python -P -m deepex.study.frameworks --list` prints the same as JSON. What such a job writes is an ordinary run directory. DeepEx
itself is measured by `deepex train`, with the settings in OURS. Nothing is imported here until it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from deepex.errors import UnknownName

if TYPE_CHECKING:
    from deepex.study.frameworks.base import Availability, Framework

__all__ = ["FRAMEWORKS", "OURS", "available", "find"]

FRAMEWORKS: Final = {
    "pytorch": "pytorch_ddp:PytorchDdp",
    "lightning": "lightning:Lightning",
    "jax": "jax_flax:JaxFlax",
    "keras": "keras:Keras",
}

# How DeepEx runs beside them: as it does by itself, and with the arithmetic of the others.
OURS: Final[dict[str, dict[str, Any]]] = {"deepex": {}, "deepex-gradients": {"sync.strategy": "gradients"}}


def find(name: str) -> "Framework":
    """Look up a framework by its name; what it stands for need not be installed."""
    if name not in FRAMEWORKS:
        raise UnknownName("framework", name, FRAMEWORKS)
    module, _, cls = FRAMEWORKS[name].partition(":")
    framework: Framework = getattr(import_module(f"deepex.study.frameworks.{module}"), cls)()
    return framework


def available() -> dict[str, "Availability"]:
    """Tell of each framework which version is installed, or why none is and what to do about it."""
    return {name: find(name).available() for name in FRAMEWORKS}
