"""When replicas agree: the rules for the period, one file each, and how a person writes them.

    rule = read_period("4 per epoch", options, Situation())

A rule's file has its class, the options that it declares in `sync.*`, and `parse`, which knows how it is written (`WRITTEN`).
"""

from types import ModuleType
from typing import Any, Final

from deepex.errors import ConfigError
from deepex.record.options import Options, load_kinds, options_in
from deepex.sync.when.rule import PeriodRule, Reader, Situation

RULES: Final = ["fixed", "until", "adacomm", "qsr", "auto"]


def rule_modules() -> list[ModuleType]:
    """The file of each rule."""
    return load_kinds(__name__, RULES)


def rule_options() -> tuple[type[Options], ...]:
    """What the rules declare in `sync.*`."""
    return tuple(kind for module in rule_modules() for kind in options_in(module))


def read_period(period: int | str, options: Any, situation: Situation) -> PeriodRule:
    """Read a period as a person writes it: 16, "epoch", "4 per epoch" (or "4/epoch"), "1 until 5 then 16", or a rule's name."""
    modules = rule_modules()
    reader = Reader(options=options, situation=situation, parsers=tuple(module.parse for module in modules))
    rule = None
    if isinstance(period, int | str):
        rule = reader.read(str(int(period)) if isinstance(period, int) else period.strip())
    if rule is None:
        ways = [module.WRITTEN for module in modules]
        patterns, names = [way for way in ways if " " in way], [way for way in ways if " " not in way]
        raise ConfigError(f"sync.period is {period!r}; it must be {', '.join(patterns)}, or one of {', '.join(names)}")
    return rule
