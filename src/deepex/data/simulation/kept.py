"""The directory in which trajectories are kept: it has those of one request, which is written down there.

claim(Path("trajectories"), {"images": 100_000, "seed": 1}, overwrite=False)
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepex.errors import DataError, RunError
from deepex.record.files import read_json, storage_error, write_json

REQUEST_NAME: Final = "request.json"
_TRAJECTORY: Final = re.compile(r"\.?(train|validation)-\d{5,}\.dcd(\.part)?")


def claim(directory: Path, request: Mapping[str, int], *, overwrite: bool) -> None:
    """Make `directory` the place of this request; trajectories of another one are an error, or removed."""
    path = directory / REQUEST_NAME
    known = _read(path)
    if known == request:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(entry for entry in directory.iterdir() if _TRAJECTORY.fullmatch(entry.name))
        if others and not overwrite:
            raise DataError(
                f"{directory} has trajectories, such as {others[0].name}, of {_described(known)} and not of {_described(request)}; "
                "give another directory with --keep-trajectories, or pass --overwrite to remove them"
            )
        for old in (path, *others):  # in this order, so that no request takes for its own what a kill has left
            old.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(directory, error) from error
    write_json(path, request)


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except RunError:
        return None


def _described(request: Any) -> str:
    known = isinstance(request, Mapping)
    return " ".join(f"--{key} {value}" for key, value in request.items()) if known else "a request that is not known"
