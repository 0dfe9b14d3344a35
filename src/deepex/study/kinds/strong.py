"""Strong scaling: ranks at fixed total work. The paper's figures 4 to 13."""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant, check_ranks, crowded


@final
@dataclass(frozen=True, kw_only=True)
class Strong(Kind):
    """More ranks on the same dataset. Each rank keeps its batch, as in the paper, or shares a `total_batch` with the others."""

    name: ClassVar[str] = "strong"
    ranks: tuple[int, ...] = (1, 2, 4)
    total_batch: int = 0

    def __post_init__(self) -> None:
        check_ranks(self.ranks, least=2)
        for ranks in self.ranks if self.total_batch else ():
            if self.total_batch % ranks or self.total_batch < ranks:
                raise ConfigError(
                    f"--total-batch is {self.total_batch}; it must be a multiple of each number of ranks, so of {ranks}"
                )

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        threads = subject.threads(max(self.ranks))
        return [
            Variant(
                varied={"ranks": ranks},
                ranks=ranks,
                settings={"threads": threads} | ({"batch": self.total_batch // ranks} if self.total_batch else {}),
            )
            for ranks in sorted(self.ranks)
        ]

    @override
    def notes(self, subject: Subject) -> list[str]:
        most = max(self.ranks)
        shared = f"{self.total_batch} in all" if self.total_batch else f"{subject.config.batch} on each rank"
        return [f"the whole dataset each time; batch {shared}", *crowded(subject, most, subject.threads(most))]
