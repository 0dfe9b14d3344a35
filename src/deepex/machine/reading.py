"""Readings that may fail. A description of a machine is never worth a crashed run: what cannot be read is None.

>>> driver = attempt(nvml.nvmlSystemGetDriverVersion)
>>> limit = read_number(Path("/sys/fs/cgroup/memory.max"))     # None for "max"
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def attempt(read: Callable[[], T]) -> T | None:
    """Return what `read` returns, or None if it fails in any way."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - drivers, containers and odd kernels fail in ways nobody can list
        return None


def read_text(path: Path) -> str | None:
    """Read a small file of the kernel."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Read a file that holds one whole number; anything else, such as "max", is None."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
