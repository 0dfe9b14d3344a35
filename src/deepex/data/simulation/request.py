"""What is asked of a simulation, and the stream of random numbers that each unit of it draws from.

>>> request = Request(count=27000, seed=1, part="train")
>>> request.entropy(4) == Request(count=9, seed=1, part="validation").entropy(4)
False
"""

from dataclasses import dataclass
from typing import Literal

from deepex.errors import DataError

PartName = Literal["train", "validation"]
_PARTS: tuple[PartName, ...] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Request:
    """`count` samples of a part, from a seed."""

    count: int
    seed: int
    part: PartName

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(f"{self.count} samples of the part {self.part!r} were asked for; ask for at least 1")
        if self.seed < 0:
            raise DataError(f"the seed is {self.seed}; it must not be negative: give 0 or more")
        if self.part not in _PARTS:
            raise DataError(f"the part is {self.part!r}; it must be {' or '.join(_PARTS)}: correct it")

    def entropy(self, unit: int) -> tuple[int, int, int]:
        """What seeds the specimen or trajectory of this number, whoever computes it: no two units of both parts share it."""
        return self.seed, _PARTS.index(self.part), unit
