"""Weak scaling: the work grows with the ranks. Stampede2's study of efficiency and generalisation."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from typing_extensions import override

from deepex.study.kinds.base import Kind, Subject, Variant, check_ranks, crowded


@final
@dataclass(frozen=True, kw_only=True)
class Weak(Kind):
    """More ranks, each with the same work.

    With `grow="data"` P ranks have P shares of the dataset, of which the most ranks have all: the time of an epoch should stay.
    With `grow="batch"` all have the whole dataset, and the batch over which gradients are averaged in each step grows: the time of
    a step should stay, and after equally many epochs the validation error tells what the larger batch costs.
    """

    name: ClassVar[str] = "weak"
    ranks: tuple[int, ...] = (1, 2, 4)
    grow: Literal["data", "batch"] = "data"

    def __post_init__(self) -> None:
        check_ranks(self.ranks, least=2)

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        most = max(self.ranks)
        return [self._variant(subject, ranks, most) for ranks in sorted(self.ranks)]

    def _variant(self, subject: Subject, ranks: int, most: int) -> Variant:
        threads = {"threads": subject.threads(most)}
        if self.grow == "data":
            samples = subject.samples // most * ranks
            return Variant(varied={"ranks": ranks, "samples": samples}, ranks=ranks, settings=threads | {"samples": samples})
        batch = subject.config.batch * ranks
        own = {} if {"sync", "sync.strategy"} & subject.chosen else {"sync.strategy": "gradients"}
        return Variant(varied={"ranks": ranks, "batch": batch}, ranks=ranks, settings=threads | own)

    @override
    def notes(self, subject: Subject) -> list[str]:
        most = max(self.ranks)
        return crowded(subject, most, subject.threads(most))
