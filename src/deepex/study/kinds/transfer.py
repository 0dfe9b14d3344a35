"""What the machine's paths carry: bandwidth and latency over sizes, for each communicator."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant

_PATHS: Final = 6  # some of them are there only with more ranks, others only with a GPU
_SIZES: Final = 13  # 8 bytes to 64 MiB


@final
@dataclass(frozen=True, kw_only=True)
class Transfer(Kind):
    """Every path of `ranks` ranks with each of `comms`, `seconds` for each size. All-reduce runs on 2, 4, … and all ranks.

    Empty `comms`: MPI, gloo, and NCCL where each rank has a GPU. One rank has no path to another: what is left is within memory and
    between host and device, whatever the communicator.
    """

    name: ClassVar[str] = "transfer"
    ranks: int = 4
    comms: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    seconds: float = 0.3

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ConfigError(f"--seconds is {self.seconds}; it must be above 0")

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        found = ("mpi", "gloo", *(("nccl",) if subject.gpus >= self.ranks else ())) if self.ranks > 1 else ("mpi",)
        sizes = ("--sizes", ",".join(map(str, self.sizes))) if self.sizes else ()
        about = 5 + _PATHS * (len(self.sizes) or _SIZES) * self.seconds
        return [
            Variant(
                varied={"comm": comm},
                ranks=self.ranks,
                program=("deepex.study.transfer", "--comm", comm, "--seconds", str(self.seconds), *sizes),
                trains=False,
                estimate_seconds=about,
            )
            for comm in self.comms or found
        ]

    @override
    def notes(self, subject: Subject) -> list[str]:
        if self.ranks == 1:
            return ["one rank: nothing passes between ranks; --ranks 2 or more measures that too"]
        shared = self.ranks > subject.cores
        return [f"{self.ranks} ranks share {subject.cores} core(s): what they measure is the sharing too"] if shared else []
