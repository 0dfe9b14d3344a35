"""JSON and TOML as records hold them: whatever else a damaged file has is an error of ours that says where and why.

>>> parse_json('{"ranks": 4}', "run.json")
{'ranks': 4}
>>> parse_json('{"ranks": 4, "ranks": 8}', "run.json")
Traceback (most recent call last):
deepex.errors.RunError: run.json is damaged: key 'ranks' is there twice; restore it or start a new run

The parsers of Python raise RecursionError for deep nesting, ValueError for an integer of 5,000 digits, and take `1e999`, `NaN`,
half of a surrogate pair and a key that is there twice. None of these is ever written, but for `NaN` and `Infinity` as a loss:
a reader that expects neither says `finite=True`.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any, Final, NoReturn

from deepex.errors import ConfigError, RunError, UserError

MOST_LEVELS: Final = 64  # of tables and lists within each other; records have 6
INTEGERS: Final = (-(2**63), 2**64 - 1)  # the most negative int64 to the highest uint64, such as a seed or an inode
_DIGITS: Final = 20  # of the highest of them
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_REMEDY: Final = "restore it or start a new run"
_TOO_DEEP: Final = f"tables and lists are nested more than {MOST_LEVELS} levels deep"
_TOO_LARGE: Final = "an integer has more than 64 bits"


def parse_json(
    text: str | bytes, what: str, *, finite: bool = False, error: type[UserError] = RunError, remedy: str = _REMEDY
) -> Any:
    """Give the value of a JSON text. What is wrong with it is an `error` about `what`, with the `remedy`.

    `finite` refuses NaN and Infinity. A number beyond the range of a float is in any case.
    """
    try:
        decoded = _decoded(text)
        return _json_value(decoded, finite=finite)
    except json.JSONDecodeError as found:
        raise error(f"{what} is damaged at offset {found.pos}: {found.msg}; {remedy}") from found
    except _DamageError as found:
        offset = found.start if found.start is not None else _offset(decoded, found.token)
        raise error(f"{what} is damaged{'' if offset is None else f' at offset {offset}'}: {found}; {remedy}") from None


def parse_toml(
    text: str | bytes, what: str, *, error: type[UserError] = ConfigError, remedy: str = "mend it there"
) -> dict[str, Any]:
    """Give the table of a TOML text, in the same way. It may have `inf`, which a configuration can mean."""
    try:
        return _toml_value(_decoded(text))
    except tomllib.TOMLDecodeError as found:
        raise error(f"{what} is not valid TOML: {found}; {remedy}") from found
    except _DamageError as found:
        if found.start is not None:
            raise error(f"{what} is not text (byte {found.start} is not UTF-8); {remedy}") from None
        raise error(f"{what} is not valid: {found}; {remedy}") from None


class _DamageError(ValueError):
    """Something that no record holds: at `start`, or where `token` first stands outside of a text."""

    def __init__(self, why: str, *, token: str = "", start: int | None = None) -> None:
        super().__init__(why)
        self.token, self.start = token, start


def _json_value(text: str, *, finite: bool) -> Any:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_refuse_constant if finite else None,
        )
    except RecursionError:
        raise _DamageError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MOST_LEVELS:  # else it cannot be deep
        _check_levels(value)
    if "\\ud" in text or "\\uD" in text:  # else nothing can hold a surrogate
        _check_text(value)
    return value


def _toml_value(text: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text, parse_float=_toml_float)
    except RecursionError:
        raise _DamageError(_TOO_DEEP) from None
    except (tomllib.TOMLDecodeError, _DamageError):
        raise
    except ValueError:  # Python converts no integer of thousands of digits
        raise _DamageError(_TOO_LARGE) from None
    _check_levels(table)
    for value in _inner(table):
        _check_plain(value)
    return table


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as found:
            raise _DamageError("not UTF-8", start=found.start) from None
    if half := _SURROGATE.search(text):
        raise _DamageError("not UTF-8", start=half.start())
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DamageError(f"key {_short(key)} is there twice")
    return table


def _integer(text: str) -> int:
    if len(text) <= _DIGITS:
        value = int(text)
        if INTEGERS[0] <= value <= INTEGERS[1]:
            return value
    raise _DamageError(f"{_short(text)} has more than 64 bits", token=text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _DamageError(f"{_short(text)} is beyond the range of numbers", token=text)
    return value


def _toml_float(text: str) -> float:
    if text.strip("+-") == "nan":
        raise _DamageError("'nan' is not a number")
    return float(text) if text.strip("+-") == "inf" else _float(text)


def _refuse_constant(text: str) -> NoReturn:
    raise _DamageError(f"{text} is not a finite number", token=text)


def _offset(text: str, token: str) -> int | None:
    """Where a token of JSON first stands, not in a text; for a message, so only once something is wrong."""
    pattern = re.compile(r'"(?:[^"\\]|\\.)*+"|' + re.escape(token)) if token else None
    found = (one for one in pattern.finditer(text) if one[0] == token) if pattern else iter(())
    return next((one.start() for one in found), None)


def _check_levels(value: Any) -> None:
    """Refuse deep nesting, which the parsers take while Python's stack lasts."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for one in level for inner in _values(one) if isinstance(inner, dict | list)]
        if not level:
            return
    raise _DamageError(_TOO_DEEP)


def _check_text(value: Any) -> None:
    for inner in _inner(value):
        if isinstance(inner, str) and _SURROGATE.search(inner):
            raise _DamageError(f"{_short(inner)} has half of a surrogate pair, so it is no text")


def _check_plain(value: Any) -> None:
    """Refuse what TOML has and a configuration has not."""
    if isinstance(value, int) and not INTEGERS[0] <= value <= INTEGERS[1]:
        raise _DamageError(_TOO_LARGE)
    if isinstance(value, datetime | date | time):
        raise _DamageError(f"{value} is a date or a time: put quotes around it")


def _inner(value: Any) -> Iterator[Any]:
    """Every value and key within `value`, itself included."""
    yield value
    if isinstance(value, dict):
        yield from value
    for one in _values(value):
        yield from _inner(one)


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _short(text: str) -> str:
    """A text for a message, however long and whatever is in it."""
    return ascii(text if len(text) <= 40 else f"{text[:37]}...")
