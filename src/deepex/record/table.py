"""Configuration dataclasses to plain tables (dict, TOML) and back, unchanged.

A component owns a frozen, keyword-only dataclass; this module fills it from a table that a person wrote, checks every key and
type, and answers a mistake with the key, the value received, the rule and the nearest valid key.

>>> @dataclass(frozen=True, kw_only=True)
... class Sync:
...     period: int | str = "epoch"
>>> from_table(Sync, {"period": 16})
Sync(period=16)
>>> from_table(Sync, {"priod": 16})
Traceback (most recent call last):
deepex.errors.ConfigError: unknown key 'priod'; did you mean period? Keys here: period
"""

import copy
import math
import tomllib
import types
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import date, time
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import tomli_w

from deepex.errors import ConfigError
from deepex.record.rule import Rule
from deepex.record.strict import INTEGERS, parse_toml

T = TypeVar("T")
_MOST_SHOWN: Final = 120


def from_table(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `kind` from `table`; `where` is the dotted key of the table in the whole configuration."""
    hints, known = _shape(kind)  # type: ignore[arg-type]  # a type is hashable
    for key in table:
        if (now := getattr(kind, "renamed", {}).get(key)) is not None:
            raise ConfigError(f"key {where + key!r} is called {where + now!r} now: write {where + now} = {table[key]!r}")
        if key not in known:
            raise ConfigError(_unknown(where + key, key, known, where))
    missing = [n for n, f in known.items() if n not in table and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ConfigError(f"key {where + missing[0]!r} is missing; it has no default: set it")
    values = {key: convert(hints[key], value, where + key) for key, value in table.items()}
    return kind(**values)


def check_types(config: object, where: str = "") -> None:
    """Check every value of a configuration against its annotation: in Python anything can be given. For `__post_init__`.

    What `from_table` converts is converted here too: a whole number to a float, a list to a tuple, a table to its dataclass.
    """
    hints, known = _shape(type(config))  # type: ignore[arg-type]  # a type is hashable
    for name, field in known.items():
        value, path = getattr(config, name), where + name
        _check_value(value, path)
        try:
            checked = convert(hints[name], value, path)
        except ConfigError as error:
            example = "" if field.default in (MISSING, None, ()) else f", for example {field.default!r}"
            raise ConfigError(f"{error}{example}") from None
        if checked is not value:
            object.__setattr__(config, name, checked)


def to_table(config: object) -> dict[str, Any]:
    """The plain table of a configuration; `from_table` gives an equal object back. A key that is None is left out."""
    table = {}
    for field in fields(config):  # type: ignore[arg-type]  # a dataclass instance
        value = getattr(config, field.name)
        if value is None:
            continue
        if is_dataclass(value):
            value = to_table(value)
        elif isinstance(value, tuple):
            value = list(value)
        table[field.name] = value
    return table


def set_values(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set keys written with dots, such as `sync.period`, in a copy of `table`. A word for a table is for its first key."""
    result = copy.deepcopy(dict(table))
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"key {path!r} cannot be set: {parent!r} is a value, not a table of keys")
        if isinstance(value, str) and isinstance(inner.get(leaf), dict) and inner[leaf]:
            inner, leaf = inner[leaf], next(iter(inner[leaf]))
        inner[leaf] = value
    return result


def differences(before: Mapping[str, Any], after: Mapping[str, Any], where: str = "") -> dict[str, list[Any]]:
    """The keys, with dots, in which two tables differ, and both values; "" where there is none."""
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys((*before, *after)):
        was, now = before.get(key, ""), after.get(key, "")
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found |= differences(was, now, f"{where}{key}.")
        elif was != now:
            found[where + key] = [was, now]
    return found


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Read `key.sub=value` assignments, as given after `--set`."""
    changes = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set got {assignment!r}; it takes KEY=VALUE, for example --set sync.period=16")
        changes[path.strip()] = parse_value(text.strip())
    return changes


def parse_value(text: str) -> Any:
    """Read a value as TOML would; what is not TOML is a string, so that nobody has to quote within quotes."""
    if "\n" in text:  # TOML would read the next line as another key
        return text
    try:
        return parse_toml(f"value = {text}", f"the value {text[:40]!a}", remedy="give another")["value"]
    except ConfigError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a syntax error names the file and the place."""
    return parse_toml(path.read_bytes().removeprefix(BOM_UTF8), str(path))  # which some editors write


def dump_toml(table: Mapping[str, Any]) -> str:
    """TOML text of a table."""
    return tomli_w.dumps(table)


@cache  # resolving annotations takes most of the time of reading a record of many epochs
def _shape(kind: Any) -> tuple[dict[str, Any], dict[str, Field[Any]]]:
    return get_type_hints(kind, include_extras=True), {f.name: f for f in fields(kind)}


@cache
def _keys(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unknown(path: str, key: str, known: Mapping[str, object], where: str) -> str:
    near = get_close_matches(key, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(where + name for name in near)}?" if near else "."
    return f"unknown key {path!r}{hint} Keys here: {', '.join(where + name for name in known)}"


def convert(hint: Any, value: Any, path: str) -> Any:
    """Check the value of the key `path` against the annotation `hint`, and return what a dataclass shall hold.

    A table is a dataclass, a TypedDict (of which keys may be missing, and others there) or a `dict[str, X]`.
    """
    if type(value) is hint and hint is not dict:  # most values of a record of many epochs
        return value
    origin = get_origin(hint)
    if origin is not None:
        return _convert_generic(origin, hint, value, path)
    if is_typeddict(hint):
        known = _keys(hint)
        return {
            key: convert(known[key], one, _join(path, key)) if key in known else one for key, one in _table(value, path).items()
        }
    if is_dataclass(hint):
        if isinstance(value, str):
            value = {_first(hint): value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{_named(path)} is {shown(value)}; it is a table: set its keys, for example {path}.{_first(hint)}")
        return from_table(hint, value, path and f"{path}.")  # type: ignore[arg-type]  # a dataclass type
    return _convert_plain(hint, value, path)


def shown(value: object) -> str:
    """A value for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _convert_generic(origin: Any, hint: Any, value: Any, path: str) -> Any:
    arguments = get_args(hint)
    if origin is Annotated:
        return _convert_ruled(arguments[0], arguments[1:], value, path)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is Literal:
        if not any(value is one or (type(value) is type(one) and value == one) for one in arguments):
            choices = ", ".join(map(str, arguments))
            raise ConfigError(f"{_named(path)} is {shown(value)}; it must be one of: {choices}")
        return value
    if origin is dict:
        return {key: convert(arguments[1], one, _join(path, key)) for key, one in _table(value, path).items()}
    return _convert_list(origin, arguments[0], value, path)


def _convert_list(origin: Any, hint: Any, value: Any, path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_named(path)} is {shown(value)} ({type(value).__name__}); it must be a list, for example [30, 60]")
    if origin is tuple:
        return tuple(convert(hint, item, path) for item in value)
    if hint is float and set(map(type, value)) <= {float}:  # the times of many ranks
        return value
    return [convert(hint, item, f"{path}[{index}]") for index, item in enumerate(value)]


def _convert_ruled(hint: Any, rules: Iterable[Rule], value: Any, path: str) -> Any:
    found = convert(hint, value, path)
    for rule in rules:
        if not rule.holds(found):
            raise ConfigError(f"{_named(path)} is {shown(value)}; it must {rule.text}")
    return found


def _convert_union(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    kinds = [hint for hint in hints if hint is not types.NoneType]
    if value is None and len(kinds) < len(hints):
        return None
    if len(kinds) == 1:
        return convert(kinds[0], value, path)
    for hint in kinds:
        try:
            return convert(hint, value, path)
        except ConfigError:
            continue
    names = " or ".join(getattr(h, "__name__", str(h)) for h in kinds)
    raise ConfigError(f"{_named(path)} is {shown(value)} ({type(value).__name__}); it must be {names}")


def _convert_plain(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{_named(path)} is {shown(value)}; it must be within the range of numbers of 64 bits") from None
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return dict(value) if hint is dict else value
    raise ConfigError(f"{_named(path)} is {shown(value)} ({type(value).__name__}); it must be {hint.__name__}")


def _table(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ConfigError(f"{_named(path)} is {shown(value)} ({type(value).__name__}); it must be a table")


def _named(path: str) -> str:
    return f"key {path!r}" if path else "it"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _check_value(value: Any, path: str, *, option: bool = False) -> None:
    """Refuse numbers that no setting can mean, and options of somebody's function that `config.toml` cannot hold."""
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not option)):
        raise ConfigError(f"key {path!r} is {value}; it must be a finite number: set one")
    if isinstance(value, int) and not INTEGERS[0] <= value <= INTEGERS[1]:
        raise ConfigError(f"key {path!r} is a number of {value.bit_length()} bits; it must fit in 64: set a smaller one")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"key {path!r} is {shown(value)}; no text or path may have a zero byte: leave it out")
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(item, path, option=option)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_value(item, f"{path}.{key}", option=True)
    elif option and not isinstance(value, str | int | float | date | time):
        raise ConfigError(
            f"key {path!r} is {value!r} ({type(value).__name__}); it must be text, a number, true or false, a list or a table, "
            "because it is written to config.toml: name the thing instead, and let your function look it up"
        )


def _first(kind: Any) -> str:
    return fields(kind)[0].name
