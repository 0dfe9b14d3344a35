"""Run the program of frameworks on real ranks, as a study does."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepex.recipes import recipe
from deepex.record import RunDirectory
from deepex.record.files import write_text
from deepex.record.table import dump_toml, to_table
from deepex.study.frameworks import find
from tests.mpi import run_ranks

SMALL = {"epochs": 2, "batch": 16, "threads": 1, "device": "cpu", "deterministic": True}


def need(name: str) -> None:
    """Skip, with the remedy, where a framework that is not in the extra `dev` is not installed."""
    found = find(name).available()
    if found.version is None:
        pytest.skip(f"{name}: {found.reason}")


def write_config(path: Path, **changes: Any) -> Path:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    write_text(path, dump_toml(to_table(recipe("fashion", SMALL | keys))))
    return path


def run_framework(name: str, ranks: int, out: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    config = write_config(out.with_suffix(".toml"), **changes)
    return run_ranks(ranks, "-m", "deepex.study.frameworks", name, str(config), "--out", str(out))


def trained(name: str, ranks: int, out: Path, **changes: Any) -> RunDirectory:
    done = run_framework(name, ranks, out, **changes)
    assert done.returncode == 0, done.stderr
    return RunDirectory.open(out)
