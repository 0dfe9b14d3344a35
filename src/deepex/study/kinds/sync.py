"""How often and how replicas agree: the frontier of per-epoch speedup and epochs to a target."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant, check_ranks, crowded

_WITHOUT_PERIOD: Final = ("gradients", "auto")


@final
@dataclass(frozen=True, kw_only=True)
class Sync(Kind):
    """Strategies × periods on `ranks` ranks, against one rank alone. `gradients` and `auto` have no period to choose."""

    name: ClassVar[str] = "sync"
    trains_to_target: ClassVar[bool] = True
    ranks: int = 2
    strategies: tuple[str, ...] = ("gradients", "weights", "background", "auto")
    periods: tuple[str, ...] = ("1", "8", "64", "epoch")

    def __post_init__(self) -> None:
        check_ranks((self.ranks,))
        if self.ranks < 2:
            raise ConfigError("--ranks is 1; how replicas agree shows on 2 or more")

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        threads = {"threads": subject.threads(self.ranks)}
        base = Variant(varied={"strategy": "one rank", "period": ""}, ranks=1, settings=threads)
        settings = [
            Variant(varied={"strategy": strategy, "period": period}, ranks=self.ranks, settings=threads | _keys(strategy, period))
            for strategy, period in self._pairs()
        ]
        return [base, *settings]

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for strategy in self.strategies:
            if strategy in _WITHOUT_PERIOD:
                yield strategy, ""
            else:
                yield from ((strategy, period) for period in self.periods)

    @override
    def notes(self, subject: Subject) -> list[str]:
        return crowded(subject, self.ranks, subject.threads(self.ranks))


def _keys(strategy: str, period: str) -> dict[str, str]:
    return {"sync.strategy": strategy} | ({"sync.period": period} if period else {})
