"""What a file of optimisers, period rules or strategies declares of its own among the keys of a table.

@dataclass(frozen=True, kw_only=True)
class ElasticOptions(Options):
    elasticity: float = 0.9

    rules = {"elasticity": (lambda value: 0 < value <= 1, "above 0 and at most 1")}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Final

from deepex.errors import ConfigError

KeyRule = tuple[Callable[[Any], bool], str]  # what must hold of a value, and that in words
KeyRules = Mapping[str, KeyRule]

_MOST_PARTS: Final = 4096
PARTS: Final[KeyRule] = (lambda value: 1 <= value <= _MOST_PARTS, f"from 1 to {_MOST_PARTS}")
SHARE: Final[KeyRule] = (lambda value: 0 < value <= 1, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keys with their defaults, and the `rules` for them."""

    rules: ClassVar[KeyRules] = {}


def check_rules(config: object, kinds: tuple[type[Options], ...], where: str) -> None:
    """Raise ConfigError for the first key of `config` that breaks a rule of what it is composed of."""
    for kind in kinds:
        for name, (holds, rule) in kind.rules.items():
            if not holds(value := getattr(config, name)):
                raise ConfigError(f"{where}{name} is {value!r}; it must be {rule}")


def load_kinds(package: str, names: Sequence[str]) -> list[ModuleType]:
    """The files of a package that a table names; a name with a dot is a module elsewhere."""
    return [import_module(name if "." in name else f"{package}.{name}") for name in names]


def options_in(module: ModuleType) -> list[type[Options]]:
    """What a file declares of its own."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Options)]
    return [kind for kind in kinds if kind.__module__ == module.__name__]
