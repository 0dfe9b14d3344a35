"""The contract of a framework that DeepEx is compared with.

    framework = find("jax")
    framework.available()                      # Availability(version="jax 0.10.2, flax 0.12.0, optax 0.2.8", reason="")
    framework.prepare(os.environ, threads=1)   # before its libraries are loaded
    training = framework.build(task)           # raises UnsupportedTask rather than train something else
    training.run(told)                         # `told` hears of every epoch and answers whether to go on

The modules of frameworks load what they stand for in `build`, not before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from deepex.errors import ConfigError

if TYPE_CHECKING:
    from deepex.study.frameworks.workload import Workload
    from deepex.training.config import RunConfig


class UnsupportedTask(ConfigError):  # noqa: N818 - reads better where it is raised
    """A framework, as it is used here, cannot train what the configuration says; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The installed `version`, or None and the `reason`, with what would mend it."""

    version: str | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Loss and measures, each summed over so many samples."""

    loss: float = 0.0
    measures: list[float] = field(default_factory=list)
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class RankEpoch:
    """What one rank did in one epoch. `seconds` are of training alone, until the device has done it; of validation, the others."""

    train: Sums
    seconds: float
    validation: Sums
    validation_seconds: float


Told = Callable[[RankEpoch], bool]


class Training(ABC):
    """A network and its samples, ready to be trained on this rank; `settings` tell how, for the record."""

    settings: dict[str, Any]

    @abstractmethod
    def run(self, told: Told) -> None:
        """Train epoch after epoch, as many as the configuration says, or until `told` answers that it is enough."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the other ranks. Collective."""


class Framework(ABC):
    """A framework: its `name`, the `packages` it is made of, and the `requirement` that pip would install."""

    name: str
    packages: tuple[str, ...]
    requirement: str

    def available(self) -> Availability:
        """Find out which version is installed, without loading it."""
        found, lacking = [], []
        for package in self.packages:
            try:
                found.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                lacking.append(package)
        if lacking:
            what = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"
            remedy = f"`pip install {self.requirement}`, or `pip install 'deepex[peers]'` for all frameworks"
            return Availability(version=None, reason=f"{what}: {remedy}")
        return Availability(version=", ".join(found))

    def prepare(self, environ: MutableMapping[str, str], *, threads: int) -> None:
        """Set what the libraries read only while they are loaded."""
        return

    def check(self, config: "RunConfig", *, ranks: int) -> None:
        """Raise UnsupportedTask for what the configuration asks for and the framework does not do."""
        refuse_foreign(self.name, config, ranks=ranks)

    @abstractmethod
    def build(self, task: "Workload") -> Training:
        """Make everything ready on this rank: compiled, tried, warmed up, but not trained. Collective."""


def refuse_foreign(name: str, config: "RunConfig", *, ranks: int) -> None:
    """Raise UnsupportedTask for what DeepEx has and no framework is asked to do here."""
    rules = (
        (config.optim.method == "sgd", f"optim.method is {config.optim.method}", "optim.method=sgd"),
        (not any((config.augment.crop, config.augment.pad, config.augment.flip)), "samples are varied (augment)", "augment.*=0"),
        (config.replicas in (0, ranks), f"replicas is {config.replicas} on {ranks} rank(s)", "replicas=0, for one per rank"),
        (not config.data_options, "HDF5 is read without packing", "data to a packed dataset (`deepex data pack`)"),
    )
    for holds, what, remedy in rules:
        if not holds:
            raise UnsupportedTask(f"{name} does not train this here: {what}; set {remedy}")


def loop(epochs: int, epoch: Callable[[int], RankEpoch], told: Told) -> None:
    """Run epochs one after another until it is enough."""
    for number in range(epochs):
        if not told(epoch(number)):
            return
