from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepex.cli import app
from tests.report.records import Made, write_run


@pytest.mark.parametrize("phases", [True, False])
def test_phases_are_shown_where_they_are_known(phases: bool, tmp_path: Path) -> None:
    """Another framework runs them into one another: zeros would be a lie."""
    state = {"placement": {"kind": "device", "reason": "it fits"}, "threads": 1}
    made = Made(ranks=2, phases=phases, config={"deterministic": False})
    run = write_run(tmp_path / "run", replace(made, state=state))
    result = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert ("FwdTime" in result.output) == phases
    assert ("backward" in result.output) == phases
    assert ("phases are not told apart" in result.output) != phases
    assert "epoch takes" in result.output
