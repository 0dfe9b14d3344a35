"""Ranks prove that they run the same.

    rows = gather_same(comm, {"seed": 1, "batch": 32}, value)    # everybody's `value`; an error on all ranks if facts differ

Where the facts are the same, and they nearly always are, this is one gather: a digest travels with what is gathered anyway.
"""

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from deepex.comm.together import AgreedError
from deepex.errors import ConfigError

if TYPE_CHECKING:
    from deepex.comm.base import Communicator

_MOST: Final = 4  # differences that are told
_LONGEST: Final = 60  # characters of a value


def gather_same(comm: "Communicator", facts: Mapping[str, object], value: object) -> list[Any]:
    """Give every rank all ranks' `value`, in rank order, after seeing that all have the same `facts`. Collective."""
    texts = as_texts(facts)
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    rows = comm.gather([digest, value])
    if len({row[0] for row in rows}) > 1:
        raise AgreedError(ConfigError(difference(comm.gather([socket.gethostname(), texts]))))
    return [row[1] for row in rows]


def as_texts(facts: Mapping[str, object]) -> dict[str, str]:
    """Facts as they are compared."""
    return {key: json.dumps(fact, sort_keys=True, default=repr) for key, fact in facts.items()}


def difference(told: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Say in which facts ranks differ, from the host and the texts of each; empty if in none."""
    keys = list(dict.fromkeys(key for _, texts in told for key in texts))
    differ = [key for key in keys if len({texts.get(key) for _, texts in told}) > 1]
    parts = [f"{key} is {_sides(key, told)}" for key in differ[:_MOST]]
    if not differ:
        return ""
    more = f"; {len(differ) - _MOST} more differ" if len(differ) > _MOST else ""
    return f"the ranks do not run the same: {'; '.join(parts)}{more}; start all of them with one configuration and one installation"


def _sides(key: str, told: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    sides: dict[str, list[str]] = {}
    for rank, (host, texts) in enumerate(told):
        sides.setdefault(texts.get(key, "not set"), []).append(f"{rank} on {host}")
    return ", and ".join(f"{_short(text)} on rank {_some(ranks)}" for text, ranks in sides.items())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _some(ranks: list[str]) -> str:
    return ", ".join(ranks[:3]) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
