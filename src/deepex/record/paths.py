"""Paths that are written into other files: job scripts, records, messages.

    check_path(Path("runs/a"), "--out")

A newline in a path would end the line of a job script or of a log that names it, and begin another.
"""

import re
from os import PathLike, fspath
from typing import Final

from deepex.errors import ConfigError

CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # the last two end a line too


def check_path(path: str | PathLike[str], what: str) -> None:
    """Refuse a path with a control character; `what` is the option that gave it."""
    if CONTROL.search(fspath(path)):
        raise ConfigError(f"{what} is {fspath(path)!a}; a path must not have control characters such as newlines: choose another")
