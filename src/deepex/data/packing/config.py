"""What is kept of a source and how it is stored: the options of a packing."""

import math
from dataclasses import dataclass
from typing import Literal

from deepex.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """What is kept of a source, and how it is stored; building one checks it.

    `validation`: the share of the train samples to set aside when the source has no validation part of its own (0: none). A limit
    takes the first samples after the shuffle, with `balance` equally many of each class. `dtype`: by default bytes for
    integers that fit, else float32. `scale`: the values that map to 0 and 1. `file_bytes`: of one file of images; by default a
    sixteenth of the part, between 16 and 64 MiB. `compress`: for datasets that are shipped; they are read into memory whole.
    """

    validation: float = 0.1
    seed: int = 1
    given_order: bool = False
    limit: int | None = None
    validation_limit: int | None = None
    balance: bool = False
    name: str | None = None
    classes: tuple[str, ...] | None = None
    dtype: Literal["uint8", "float16", "float32"] | None = None
    scale: tuple[float, float] | None = None
    license: str | None = None
    file_bytes: int | None = None
    compress: bool = False
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise DataError(
                f"validation is {self.validation}; it must be a share of the train samples, 0 or more and below 1, or a file"
            )
        if not 0 <= self.seed < 2**64:
            raise DataError(f"seed is {self.seed}; it must be 0 or more, and below 2^64")
        for key in ("limit", "validation_limit", "file_bytes"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise DataError(f"{key.replace('_', ' ')} is {value}; it must be 1 or more")
        if self.balance and self.limit is None and self.validation_limit is None:
            raise DataError(
                "balance was given without a limit, so that all samples would be kept; say with --limit or --validation-limit how "
                "many of all classes to keep, or leave --balance out"
            )
        scale = self.scale
        if scale is not None and not (all(map(math.isfinite, scale)) and scale[0] < scale[1]):
            raise DataError(f"scale is {scale[0]}, {scale[1]}; it must be two numbers, low below high, that map to 0 and 1")
