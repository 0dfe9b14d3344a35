import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepex.cli import app
from deepex.errors import ConfigError, RunError
from deepex.record.run import hold
from deepex.record.table import dump_toml
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


STATE = {"placement": {"kind": "device", "reason": "it fits"}, "threads": 1}
MADE = Made(ranks=2, config={"deterministic": False}, state=STATE)


def test_a_killed_run_is_shown_as_such_with_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", MADE, status="running", reason="")
    with hold(run):
        assert f"{run}: running" in CliRunner().invoke(app, ["show", str(run)]).output
    words = f"killed: its process ended without a word; go on with `deepex train --resume {run}`"
    assert words in CliRunner().invoke(app, ["show", str(run)]).output
    told = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).output)["state"]
    assert told["status"] == "killed"
    assert "--resume" in told["reason"]


@pytest.mark.parametrize(
    ("file", "key"), [("run.json", ("comm", "reason")), ("run.json", ("samples",)), ("config.toml", ("net",))], ids=str
)
def test_a_key_that_is_missing_is_named(tmp_path: Path, file: str, key: tuple[str, ...]) -> None:
    path = write_run(tmp_path / "run", MADE) / file
    read, write = (tomllib.loads, dump_toml) if path.suffix == ".toml" else (json.loads, json.dumps)
    table = inner = read(path.read_text(encoding="utf-8"))
    for name in key[:-1]:
        inner = inner[name]
    del inner[key[-1]]
    path.write_text(write(table), encoding="utf-8")
    with pytest.raises(RunError) as caught:
        CliRunner().invoke(app, ["show", str(path.parent)], catch_exceptions=False)
    assert f"{path} is damaged: key {'.'.join(key)!r} is missing; restore the file" in str(caught.value)


def test_what_a_record_holds_is_text_and_no_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(MADE, drift=True))
    lines = [
        json.loads(line) | {"period": "[/bold] 16"} for line in (run / "epochs.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (run / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert "[/bold] 16" in shown.output


def test_a_target_that_is_a_number_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(MADE, config={"deterministic": False, "target": 0.2}))
    with pytest.raises(ConfigError, match=r"target is '0\.2'; it must be"):
        CliRunner().invoke(app, ["show", str(run)], catch_exceptions=False)


def test_memory_is_shown_wherever_in_an_epoch_it_was_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(MADE, usage=True))
    lines = [json.loads(line) for line in (run / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["usage"]["memory_bytes"] = {"forward": [3e6, 4e6]}
    (run / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert "memory of a rank, at most: 4 MB" in shown.output


@pytest.mark.parametrize("part", ["train", "validation"])
def test_an_epoch_without_the_measure_of_others_is_shown_without(tmp_path: Path, part: str) -> None:
    run = write_run(tmp_path / "run", MADE)
    lines = [json.loads(line) for line in (run / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    del lines[2][part]["measures"]["error"]
    (run / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert f"{lines[3][part]['measures']['error']:.4f}" in shown.output


def test_a_drift_without_what_it_is_compared_with_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(MADE, drift=True))
    lines = [json.loads(line) for line in (run / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    del lines[2]["moved"]
    (run / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert f"{lines[2]['drift']['all']:.2%}" in shown.output
