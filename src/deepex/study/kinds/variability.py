"""How much runs differ: from epoch to epoch, rank to rank, run to run, seed to seed."""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant, crowded


@final
@dataclass(frozen=True, kw_only=True)
class Variability(Kind):
    """The same run on `ranks` ranks, with each of `seeds` seeds; the repeats of a seed tell what the machine adds."""

    name: ClassVar[str] = "variability"
    ranks: int = 2
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.ranks < 1:
            raise ConfigError(f"--seeds is {self.seeds} and --ranks {self.ranks}; both must be at least 1")

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        first, threads = subject.config.seed, subject.threads(self.ranks)
        return [
            Variant(varied={"seed": seed}, ranks=self.ranks, settings={"seed": seed, "threads": threads})
            for seed in range(first, first + self.seeds)
        ]

    @override
    def notes(self, subject: Subject) -> list[str]:
        return crowded(subject, self.ranks, subject.threads(self.ranks))
