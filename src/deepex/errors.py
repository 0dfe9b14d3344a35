"""Every error that DeepEx raises on purpose, and how any other is told.

    DeepexError
    ├── UserError            exit code 2: the caller can mend it; the message says what was received, the rule, the remedy
    │   ├── ConfigError      a key, a value or a combination of them
    │   ├── DataError        a dataset or an input file
    │   ├── RunError         a run directory or a checkpoint
    │   │   └── DamagedError     a file of it is not what was written; an earlier one may be
    │   └── UnknownName      a look-up that failed; lists the choices
    └── FailureError         exit code 1: the run went wrong
        ├── DivergedError    the loss is no longer a number
        ├── StorageError     a file could not be written
        └── CommError        a communicator could not be built or broke

>>> raise UnknownName("network", "resnt18", ["lenet", "resnet18"])
Traceback (most recent call last):
deepex.errors.UnknownName: unknown network 'resnt18'; did you mean resnet18? There are: lenet, resnet18
"""

import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Final

INTERRUPTED: Final = 130  # the exit code after Ctrl-C, which reaches all ranks


class DeepexError(Exception):
    """Anything DeepEx raises on purpose. `exit_code` is what the command line ends with.

    `agreed`: every rank of the job raises it, so one of them tells it and none waits for another.
    """

    exit_code = 1
    agreed = False


class UserError(DeepexError):
    """The caller can mend this. No traceback is shown for it."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key, value or combination that breaks a rule."""


class DataError(UserError):
    """A dataset or input file that cannot be used; the message names the file."""


class RunError(UserError):
    """A run directory or checkpoint that cannot be used as asked."""


class DamagedError(RunError):
    """A file of a run that is not what was written."""


class UnknownName(UserError):  # noqa: N818 - reads better where it is raised
    """A name that is not in the table it was looked up in."""

    def __init__(self, what: str, value: str, choices: Iterable[str]) -> None:
        names = sorted(choices)
        near = get_close_matches(value, names, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        super().__init__(f"unknown {what} {value!r}{hint} There are: {', '.join(names)}")


class FailureError(DeepexError):
    """The run itself went wrong."""


class DivergedError(FailureError):
    """The loss stopped being a number."""


class StorageError(FailureError):
    """A file could not be written; what was on disk before is still whole."""


class CommError(FailureError):
    """A communicator could not be built, or broke."""


def told(error: BaseException) -> str:
    """An error in one line: ours by its message, another with its kind, and with its place if it came in somebody's own code."""
    if isinstance(error, DeepexError):
        return str(error)
    text = " ".join(str(error).split()) or "no message"
    place = place_in_their_code(error)
    return f"{type(error).__name__}: {text[:400]}" + (f" ({place})" if place else "")


def place_in_their_code(error: BaseException) -> str:
    """Where in code that is neither Python's, nor of an installed package, nor ours an error came about; "" if not there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(Path(frame.filename))]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _is_theirs(file: Path) -> bool:
    if not file.is_file() or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    homes = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parent))
    return not any(file.is_relative_to(home) for home in homes)
