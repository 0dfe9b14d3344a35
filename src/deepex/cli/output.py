"""What the command line prints on, and where it is told what to write.

make_console().print(table)
typer.Option(callback=checked)      # on every option that names an output
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

HELP_NAMES: Final = ["-h", "--help"]  # for every typer app: those within `data` and `study` do not take them from the first

P = TypeVar("P", str | None, Path | None)


def make_console(**options: Any) -> "Console":
    """A terminal that prints text as it is: names and paths may hold what rich takes for markup, such as `[/data]` or `:key:`."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, **options)


class Lasting:
    """A stream whose reader may leave, or whose disk may be full: what is written from then on is lost, and nothing else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as far as it can be."""
        with self._lossy():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with self._lossy():
            self._stream.flush()

    @contextmanager
    def _lossy(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop(stream: Any) -> None:
    """Let a stream lose what is written to it, and what Python writes when it ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def use_streams() -> None:
    """Let everything be printed: a stream that is closed takes all, and one of few characters has `?` for the others."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.set_inheritable(number, True)  # a launcher wants one too
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - until Python ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")


def checked(parameter: typer.CallbackParam, path: P) -> P:
    """Give the path back if it can stand in a line of a script or a log; none is fine too."""
    if path is not None:
        from deepex.record.paths import check_path

        check_path(path, next((name for name in parameter.opts if name.startswith("--")), (parameter.name or "").upper()))
    return path
