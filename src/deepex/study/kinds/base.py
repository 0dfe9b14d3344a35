"""The contract of a kind of study: from what is studied to the variants that are run, each as often as is asked."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deepex.errors import ConfigError
from deepex.training.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is studied: a configuration, how many samples it trains on, the cores and GPUs here, and what the user set himself."""

    recipe: str
    config: RunConfig
    samples: int
    cores: int
    gpus: int = 0
    chosen: frozenset[str] = frozenset()

    def threads(self, ranks: int) -> int:
        """Threads of each rank where at most `ranks` run at once: the same in all runs, as each rank stands for one accelerator."""
        return self.config.threads or max(1, self.cores // ranks)

    @property
    def step(self) -> dict[str, str]:
        """How all runs make their steps: they stand for longer trainings, which on a GPU would earn the cost of a capture back."""
        return {"step": "fastest"} if self.config.step == "auto" and "step" not in self.chosen else {}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting of a study: how it is `varied`, on how many `ranks`, with which `settings` of the configuration.

    `program` is what runs after `python -m`; the recipe and the settings follow, where it `trains`, and else nothing. `before` is
    run first. `estimate_seconds`: of what does not train.
    """

    varied: dict[str, Any]
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    program: tuple[str, ...] = ("deepex", "train")
    before: tuple[str, ...] = ()
    trains: bool = True
    estimate_seconds: float | None = None


class Kind(ABC):
    """A kind of study with its options; a frozen dataclass."""

    name: ClassVar[str]
    trains_to_target: ClassVar[bool] = False  # whether it trains as long as the recipe does, even where no target is given

    @abstractmethod
    def variants(self, subject: Subject) -> list[Variant]:
        """What is run, the base first."""

    def check_here(self) -> None:  # noqa: B027 - most kinds need nothing
        """Refuse what this machine lacks, before anything is written."""

    def notes(self, subject: Subject) -> list[str]:
        """What a reader of the plan should know."""
        return []


def check_ranks(ranks: Sequence[int], *, least: int = 1) -> None:
    """See that the numbers of ranks make sense."""
    if len(ranks) < least or any(number < 1 for number in ranks) or len(set(ranks)) != len(ranks):
        got = ",".join(map(str, ranks))
        raise ConfigError(f"--ranks is {got!r}; it takes {least} or more different numbers from 1 up, for example --ranks 1,2,4")


def crowded(subject: Subject, ranks: int, threads: int) -> list[str]:
    """A warning, where there are more threads at work than cores."""
    if subject.config.device == "cuda" or ranks * threads <= subject.cores:
        return []
    most = subject.cores // threads
    return [f"{ranks} ranks with {threads} thread(s) each share {subject.cores} core(s): more than {most} ranks cannot gain"]
