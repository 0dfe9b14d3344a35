"""Writes that a kill cannot break: a file is either the old one or the new one, whole.

>>> write_text(Path("run/run.json"), "{}")
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from deepex.errors import RunError, StorageError
from deepex.record.strict import parse_json

LINE_REMEDY: Final = "delete the line or restore the file"


def write_atomic(path: Path, write: Callable[[Path], None], *, flush: bool = True) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk, then rename it into place.

    Without `flush` a loss of power, but no kill, may leave a broken file: for whoever flushes many at once later.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        if flush:
            flush_file(temporary)
        temporary.replace(path)
        if flush:
            flush_file(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, atomically."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def write_json(path: Path, value: object) -> None:
    """Replace `path` by the JSON of `value`, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, *, finite: bool = False) -> Any:
    """Read a JSON file; a damaged one is named with the place. `finite` refuses NaN and Infinity."""
    return parse_json(read_bytes(path), str(path), finite=finite)


def read_lines(path: Path, *, finite: bool = False, remedy: str = LINE_REMEDY) -> list[Any]:
    """Read a file of JSON lines. A last line without its end was cut off by a kill and is none."""
    *lines, _cut = read_bytes(path).split(b"\n")
    return [parse_json(line, f"{path}, line {number}", finite=finite, remedy=remedy) for number, line in enumerate(lines, start=1)]


def read_bytes(path: Path) -> bytes:
    """Read a file of a record; one that cannot be read is an error of ours."""
    if path.is_fifo():
        raise RunError(f"{path} cannot be read: it is a pipe, which would be waited for; restore it or start a new run")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; restore it or start a new run") from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """The failure of a write, with what is free and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        advice = f"{free / 1e6:.1f} MB are free there: free space or raise the quota, or write to another directory"
    else:
        advice = "check that the directory exists, is writable and is mounted"
    return StorageError(f"cannot write {path}: {error.strerror or error}; {advice}")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)


def flush_file(path: Path) -> None:
    """Force a file or a directory entry to the disk. A rename alone may reach it before the data does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
