"""What the command line prints on, and where it is told what to write.

make_console().print(table)
typer.Option(callback=checked)      # on every option that names an output
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

P = TypeVar("P", str | None, Path | None)


def make_console(**options: Any) -> "Console":
    """A terminal that prints text as it is: names and paths may hold what rich takes for markup, such as `[/data]` or `:key:`."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, **options)


def checked(parameter: typer.CallbackParam, path: P) -> P:
    """Give the path back if it can stand in a line of a script or a log; none is fine too."""
    if path is not None:
        from deepex.record.paths import check_path

        check_path(path, next((name for name in parameter.opts if name.startswith("--")), (parameter.name or "").upper()))
    return path
