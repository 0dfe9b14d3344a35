"""Train on the ranks of the pool.

run = train_on(ranks, config, tmp_path / "run", size=4)
"""

from pathlib import Path
from typing import Any

import deepex
from deepex.record import RunDirectory
from deepex.record.table import from_table, to_table
from deepex.training.config import RunConfig
from tests.pool import RankPool


def train_on(ranks: RankPool, config: RunConfig, out: Path, *, size: int = 2, resume: bool = False, **environ: str) -> RunDirectory:
    """Train `config` on the first ranks of the pool, with these variables in their environment."""
    ranks.run(_train, to_table(config), out, resume, size=size, environ=environ)
    return RunDirectory.open(out)


def train_all_on(ranks: RankPool, jobs: list[tuple[RunConfig, Path, bool]], *, size: int = 2) -> None:
    """Train several, one after another: each a configuration, its run directory, and whether the run is resumed."""
    for config, out, resume in jobs:
        train_on(ranks, config, out, size=size, resume=resume)


def _train(comm: Any, table: dict[str, Any], out: str, resume: bool) -> None:
    deepex.train(from_table(RunConfig, table), comm, out=Path(out), resume=resume)
