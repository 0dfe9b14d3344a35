"""Train several runs, one after another, on the ranks of one launch: `mpiexec -n 2 python -m tests.training.several JOB…`.

A job is JSON: the run directory, where its configuration is from, what is changed in it, and whether the run is resumed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

import deepex
from deepex.record.table import from_table, load_toml, set_values
from deepex.training.config import RunConfig


def job(out: Path, config: Path, *, resume: bool, **changes: Any) -> str:
    """One word of the command line."""
    return json.dumps({"out": str(out), "config": str(config), "resume": resume, "changes": changes})


def work(word: str, comm: Any) -> None:
    """Do what one word of the command line says, on the ranks of `comm`."""
    keys = json.loads(word)
    config = from_table(RunConfig, set_values(load_toml(Path(keys["config"])), keys["changes"]))
    deepex.train(config, comm, out=keys["out"], resume=keys["resume"])


if __name__ == "__main__":
    for each in sys.argv[1:]:
        work(each, MPI.COMM_WORLD)
