"""DeepEx beside what a user would take instead: the same network, data and batch."""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from deepex.errors import UnknownName
from deepex.study.frameworks import FRAMEWORKS, OURS, available
from deepex.study.kinds.base import Kind, Subject, Variant, crowded


@final
@dataclass(frozen=True, kw_only=True)
class Frameworks(Kind):
    """Each of `names` that is installed, on `ranks` ranks; empty: all of them."""

    name: ClassVar[str] = "frameworks"
    ranks: int = 2
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in (*OURS, *FRAMEWORKS):
                raise UnknownName("framework", name, (*OURS, *FRAMEWORKS))

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        threads = {"threads": subject.threads(self.ranks)}
        there = [name for name, found in available().items() if found.version is not None]
        wanted = [name for name in (*OURS, *FRAMEWORKS) if not self.names or name in self.names]
        ours = [
            Variant(varied={"framework": name}, ranks=self.ranks, settings=threads | OURS[name]) for name in wanted if name in OURS
        ]
        others = [
            Variant(
                varied={"framework": name},
                ranks=self.ranks,
                settings=threads,
                program=("deepex.study.frameworks", name),
            )
            for name in wanted
            if name in there or (name in self.names and name in FRAMEWORKS)  # who asks for one is told why it cannot be
        ]
        return [*ours, *others]

    @override
    def notes(self, subject: Subject) -> list[str]:
        missing = [f"not installed: {name} ({found.reason})" for name, found in available().items() if found.version is None]
        return [*missing, *crowded(subject, self.ranks, subject.threads(self.ranks))]
