"""Where the command line is told what to write: `typer.Option(callback=checked)` on every option that names an output."""

from pathlib import Path
from typing import TypeVar

import typer

P = TypeVar("P", str | None, Path | None)


def checked(parameter: typer.CallbackParam, path: P) -> P:
    """Give the path back if it can stand in a line of a script or a log; none is fine too."""
    if path is not None:
        from deepex.record.paths import check_path

        check_path(path, next((name for name in parameter.opts if name.startswith("--")), (parameter.name or "").upper()))
    return path
