"""Threads × ranks × kernels: which setting gets most out of a node. Stampede2's sweep of OpenMP threads, MKL or not."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant


@final
@dataclass(frozen=True, kw_only=True)
class Threads(Kind):
    """Every number of `threads` per rank with every number of `ranks`, with and without oneDNN, in both memory orders of images.

    Empty tuples are powers of two up to the cores. What does not fit on the cores is left out, unless they may `crowd`.
    """

    name: ClassVar[str] = "threads"
    threads: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    onednn: tuple[bool, ...] = (True, False)
    layouts: tuple[str, ...] = ("contiguous", "channels_last")
    crowd: bool = False

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        powers = tuple(2**k for k in range(subject.cores.bit_length()))
        pairs = [
            (threads, ranks)
            for threads, ranks in product(self.threads or powers, self.ranks or powers)
            if self.crowd or threads * ranks <= subject.cores
        ]
        if not pairs:
            raise ConfigError(
                f"no number of threads times ranks fits on {subject.cores} core(s); ask for fewer, or run them with --crowd"
            )
        return [
            Variant(
                varied={"threads": threads, "ranks": ranks, "onednn": onednn, "layout": layout},
                ranks=ranks,
                settings={"threads": threads, "onednn": onednn, "layout": layout},
            )
            for onednn, layout, (threads, ranks) in product(self.onednn, self.layouts, pairs)
        ]
