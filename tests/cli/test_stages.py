"""What is shown of the progress of a packing, on a terminal and in a log file."""

import pytest

from deepex.cli import stages
from deepex.cli.stages import Stages


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stages, "_LINE_SECONDS", 0)


@pytest.mark.usefixtures("log")
def test_a_log_file_gets_lines_with_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages() as told:
        told.tell("simulating", 400, 2000)
        told.tell("simulating", 1200, 2000)
        told.tell("writing", 0, 10)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "simulating: 400 of 2,000 images"  # those of an earlier run: no rate yet
    assert lines[1].startswith("simulating: 1,200 of 2,000 images, ")
    assert lines[1].endswith(" minutes left")
    assert lines[2] == "writing: 0 of 10 images"


@pytest.mark.usefixtures("log")
def test_bytes_are_shown_as_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(unit="bytes") as told:
        told.tell("verifying", 3_000_000, 7_000_000)
    assert capsys.readouterr().err == "verifying: 3 of 7 MB\n"


@pytest.mark.usefixtures("log")
def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(shown=False) as told:
        told.tell("packing", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_short_stage_leaves_no_line_in_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages() as told:
        told.tell("packing", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with Stages() as told:
        told.tell("packing", 1, 2)
    err = capsys.readouterr().err
    assert "packing" in err
    assert "━" in err
    assert "1 of 2 images" in err
