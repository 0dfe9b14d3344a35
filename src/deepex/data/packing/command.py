"""The command that makes the same dataset again, for its manifest."""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepex.data.packing.config import PackConfig
from deepex.data.source import SourceConfig


def pack_command(
    path: Path,
    reading: SourceConfig,
    packing: PackConfig,
    *,
    held_out: Path | None,
    held_out_labels: str | None,
    own_validation: bool,
    numbered: bool,
) -> str:
    """Write the command that makes the same samples in the same order. Names of files only: a path would tell of the user.

    `own_validation`: the source, or another one, had validation samples, so that no share was set aside. `numbered`: the names of
    the classes gave them their numbers.
    """
    given: dict[str, Any] = {}
    for config, default in ((reading, SourceConfig()), (packing, PackConfig())):
        given |= {
            f.name: getattr(config, f.name)
            for f in fields(default)
            if f.name in {"seed", "validation"} or getattr(config, f.name) != getattr(default, f.name)
        }
    for key in ("name", "license", "classes"):
        given.pop(key, None)
    if numbered and packing.classes is not None:
        given["classes"] = "@FILE" if any("," in name for name in packing.classes) else ",".join(packing.classes)
    if own_validation:
        given["validation"] = held_out
        given["validation_labels"] = held_out_labels
    words = ["deepex", "data", "pack", path.absolute().name, "OUT"]
    for key, value in given.items():
        words += option_words(key, value)
    return shlex.join(words)


def option_words(key: str, value: Any) -> list[str]:
    """An option and its value as they are written on the command line."""
    if value is None or value is False:
        return []
    if key == "file_bytes":
        return ["--file-mib", str(value >> 20)]
    flag = [f"--{key.replace('_', '-')}"]
    if value is True:
        return flag
    if key in {"resize", "crop", "matrix"} and isinstance(value, tuple):
        return [*flag, "x".join(map(str, value))]
    if isinstance(value, tuple):
        return [*flag, *map(str, value)]
    is_file = isinstance(value, Path) or (isinstance(value, str) and key.endswith("labels") and Path(value).is_file())
    return [*flag, Path(value).name if is_file else str(value)]
