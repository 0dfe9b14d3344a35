"""`deepex.train` inside another MPI program, on a split communicator; the caller's other ranks are untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deepex.record import RunDirectory
from tests.mpi import run_ranks


@pytest.mark.slow
def test_training_inside_a_host_program(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    result = run_ranks(4, "-m", "tests.recipes.embedded", str(make_data(64)), str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "all well"
    run = RunDirectory.open(tmp_path / "run")
    assert run.state["ranks"] == 2
    assert not (tmp_path / "never").exists()
    assert run.epochs()[-1].validation.samples == 64
