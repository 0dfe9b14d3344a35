"""What a value must be beyond its type, written where the type is: `ranks: Count`, `phases: dict[str, Times]`.

>>> from_table(EpochRecord, {"seconds": -1.0, …})
Traceback (most recent call last):
deepex.errors.ConfigError: key 'seconds' is -1.0; it must be from 1e-09 to 1e+12

`table.convert` asks each rule in an annotation `Annotated[type, rule]`; NaN is within no bounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Protocol

_MOST: Final = 1e18  # bytes, joules, a rate: what is above is no measurement, and sums of less stay finite


class Rule(Protocol):
    """Tells whether a value of the right type can be."""

    def holds(self, value: Any) -> bool:
        """Whether the value is as `text` says."""

    @property
    def text(self) -> str:
        """The end of the sentence `it must …`."""


@dataclass(frozen=True)
class Between:
    """A number within bounds, or a list of one number or more that all are."""

    low: float
    high: float

    def holds(self, value: Any) -> bool:
        """Whether none is outside."""
        if not isinstance(value, list):
            return bool(self.low <= value <= self.high)
        # The least and the greatest of a list with NaN may be any of the others; the sum is NaN.
        return bool(value) and self.low <= min(value) and max(value) <= self.high and not math.isnan(sum(value))

    @property
    def text(self) -> str:
        """The bounds."""
        return f"be from {self.low:g} to {self.high:g}"


class HasAll:
    """A table that is empty or has the key `all`, beside those of the groups of layers."""

    text = "have the key 'all' beside others"

    def holds(self, value: Mapping[str, object]) -> bool:
        """Whether it is there."""
        return not value or "all" in value


class OfTwo:
    """A list of two."""

    text = "have two values"

    def holds(self, value: list[Any]) -> bool:
        """Whether it has."""
        return len(value) == 2


class Moment:
    """A time of day with its zone."""

    text = "be a time, such as 2026-01-31T12:00:00+00:00"

    def holds(self, value: str) -> bool:
        """Whether it can be read as one."""
        try:
            return math.isfinite(datetime.fromisoformat(value).timestamp())
        except (ValueError, OverflowError):
            return False


_SECONDS: Final = Between(1e-9, 1e12)
Amount = Annotated[float, Between(0.0, _MOST)]
Amounts = Annotated[list[float], Between(0.0, _MOST)]
Seconds = Annotated[float, _SECONDS]
Times = Annotated[list[float], _SECONDS]
Count = Annotated[int, Between(0, 2**64 - 1)]
Positive = Annotated[int, Between(1, 2**64 - 1)]
Time = Annotated[str, Moment()]
Pair = Annotated[list[Any], OfTwo()]
Shares = Annotated[dict[str, float], HasAll()]
