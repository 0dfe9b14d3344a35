r"""Numbers as a reader wants them, and sentences made of them.

>>> seconds(0.01234), share(0.725), count(1200, "run")
('12.3\xa0ms', '72\xa0%', '1,200 runs')
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepex.speedup.statistics import Interval, verdict

_SPACE = "\u00a0"  # which keeps a number and its unit on one line
_TIMES = ((1e-6, "µs", 1e-3), (1e-3, "ms", 1.0), (1.0, "s", 600.0), (60.0, "min", 36_000.0), (3600.0, "h", float("inf")))
_ONCE = "; 1 run, over its epochs"
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def number(value: float) -> str:
    """Three significant digits, without an exponent where a person would not write one."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        digits = max(0, 2 - _exponent(value))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """A duration with a unit that fits."""
    for size, unit, below in _TIMES:
        if value < below:
            return f"{number(value / size)}{_SPACE}{unit}"
    raise AssertionError("the last unit has no bound")


def size(value: float) -> str:
    """Bytes with a unit that fits."""
    for factor, unit in _SIZES:
        if value >= factor:
            return f"{number(value / factor)}{_SPACE}{unit}"
    return f"{number(value)}{_SPACE}B"


def share(value: float) -> str:
    """A percentage, with a decimal where it is small."""
    return f"{100 * value:.0f}{_SPACE}%" if abs(value) >= 0.1 else f"{100 * value:.2g}{_SPACE}%"


def fast(gained: Interval) -> str:
    """What a ratio (base over the other) shows: a percentage, or from twice on how many times. Of one run each it says so."""
    text = f"{number(gained.value)} times as fast ({number(gained.low)} to {number(gained.high)})"
    if gained.low < 2:
        text = verdict(gained).replace(" %", f"{_SPACE}%")
    return f"{text[:-1]}{_ONCE})" if gained.repeats == 1 and text.endswith(")") else text


def count(many: int, what: str, plural: str = "") -> str:
    """A count and its noun."""
    return f"{many:,} {what if many == 1 else plural or what + 's'}"


def within(gained: Interval, form: Callable[[float], str] = number, *, repeats: bool = True) -> str:
    """The bounds of an interval and on how many repeats they rest: `(2.7 to 3.1; 3 repeats)`."""
    if gained.low == gained.high:
        return "(one value: no interval)"
    rests = _ONCE if gained.repeats == 1 else f"; {gained.repeats} repeats"
    return f"({form(gained.low)} to {form(gained.high)}{rests if repeats else ''})"


def listed(items: Iterable[str], most: int = 6) -> str:
    """`a, b and c`; of many the first few and how many more there are."""
    names = list(items)
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1:,} more"]
    return " and ".join(([", ".join(names[:-1])] if names[1:] else []) + names[-1:])


def value_text(value: Any) -> str:
    """A value of a configuration as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "none"
    return str(value)


def sentence(parts: Sequence[str]) -> str:
    """Parts that are there, as sentences."""
    return " ".join(part for part in parts if part)


def _exponent(value: float) -> int:
    return int(f"{value:e}".rpartition("e")[2])
