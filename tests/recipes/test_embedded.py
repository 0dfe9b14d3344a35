"""`deepex.train` inside another MPI program, on a split communicator; the caller's other ranks are untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deepex.record import RunDirectory
from tests.pool import RankPool
from tests.recipes.embedded import simulate_and_learn


@pytest.mark.ranks
def test_training_inside_a_host_program(ranks: RankPool, make_data: Callable[[int], Path], tmp_path: Path) -> None:
    ranks.run(simulate_and_learn, make_data(64), tmp_path, size=4)
    run = RunDirectory.open(tmp_path / "run")
    assert run.state["ranks"] == 2
    assert not (tmp_path / "never").exists()
    assert run.epochs()[-1].validation.samples == 64
