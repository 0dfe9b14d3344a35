"""Where compiled code is kept between runs.

>>> keep_compiled(os.environ)
'/home/me/.cache/deepex/inductor/4be1f09a77c2'

Inductor takes the directory from the environment alone, and by default keeps its code in the temporary directory of a node. Its
code for CPUs fits the processor on which it was compiled, but its key does not say which one that was; a home directory is shared
by nodes that differ. So each kind of processor has a directory of its own.
"""

import hashlib
import platform
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from deepex.machine.reading import read_text

INDUCTOR_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_TELLING: Final = ("model name", "flags", "Features", "CPU implementer", "CPU part")


def keep_compiled(environ: MutableMapping[str, str], root: Path = Path("/")) -> str | None:
    """Name the directory in `environ`, unless the user has; None where it cannot be made: then Inductor's own choice holds."""
    found = environ.get(INDUCTOR_VARIABLE)
    if found is not None and not _is_inductors_own(found):
        return found
    try:
        caches = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = caches / "deepex" / "inductor" / _processor(root)
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a full or read-only home, or none at all
        return None
    environ[INDUCTOR_VARIABLE] = str(directory)
    return str(directory)


def _is_inductors_own(directory: str) -> bool:
    """Whether Inductor has named the directory, not the user: once imported, it writes its choice into the environment."""
    path = Path(directory)
    return path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_")


def _processor(root: Path) -> str:
    """A short name for what this processor can do."""
    first = (read_text(root / "proc/cpuinfo") or "").split("\n\n")[0]
    lines = [line for line in first.splitlines() if line.startswith(_TELLING)]
    return hashlib.sha256("\n".join([platform.machine(), *lines]).encode()).hexdigest()[:12]
