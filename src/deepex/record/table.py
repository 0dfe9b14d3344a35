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
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from deepex.errors import ConfigError
from deepex.record.strict import parse_toml

T = TypeVar("T")


def from_table(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `kind` from `table`; `where` is the dotted key of the table in the whole configuration."""
    hints, known = _shape(kind)  # type: ignore[arg-type]  # a type is hashable
    for key in table:
        if key not in known:
            raise ConfigError(_unknown(where + key, key, known, where))
    missing = [n for n, f in known.items() if n not in table and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ConfigError(f"key {where + missing[0]!r} is missing; it has no default: set it")
    values = {key: _convert(hints[key], value, where + key) for key, value in table.items()}
    return kind(**values)


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
    return parse_toml(path.read_bytes(), str(path))


def dump_toml(table: Mapping[str, Any]) -> str:
    """TOML text of a table."""
    return tomli_w.dumps(table)


@cache  # resolving annotations takes most of the time of reading a record of many epochs
def _shape(kind: Any) -> tuple[dict[str, Any], dict[str, Field[Any]]]:
    return get_type_hints(kind), {f.name: f for f in fields(kind)}


def _unknown(path: str, key: str, known: Mapping[str, object], where: str) -> str:
    near = get_close_matches(key, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(where + name for name in near)}?" if near else "."
    return f"unknown key {path!r}{hint} Keys here: {', '.join(where + name for name in known)}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Check `value` against the annotation `hint` and return what the dataclass shall hold."""
    if type(value) is hint and hint is not dict:  # most values of a record of many epochs
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, path)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(map(str, get_args(hint)))
            raise ConfigError(f"key {path!r} is {value!r}; it must be one of: {choices}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"key {path!r} is {value!r}; it must be a list, for example [30, 60]")
        return tuple(_convert(get_args(hint)[0], item, path) for item in value)
    if is_dataclass(hint):
        if isinstance(value, str):
            value = {_first(hint): value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"key {path!r} is {value!r}; it is a table: set its keys, for example {path}.{_first(hint)}")
        return from_table(hint, value, f"{path}.")  # type: ignore[arg-type]  # a dataclass type
    return _convert_plain(hint, value, path)


def _convert_union(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    for hint in hints:
        try:
            return _convert(hint, value, path)
        except ConfigError:
            continue
    names = " or ".join(getattr(h, "__name__", str(h)) for h in hints if h is not types.NoneType)
    raise ConfigError(f"key {path!r} is {value!r} ({type(value).__name__}); it must be {names}")


def _convert_plain(hint: Any, value: Any, path: str) -> Any:
    kind = get_origin(hint) or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return dict(value) if kind is dict else value
    raise ConfigError(f"key {path!r} is {value!r} ({type(value).__name__}); it must be {kind.__name__}")


def _first(kind: Any) -> str:
    return fields(kind)[0].name
