"""What is printed is what it says: names, paths and reasons may hold what a terminal library takes for markup."""

import io
from pathlib import Path

import pytest
from rich.table import Table

import deepex.cli
from deepex.cli.output import make_console
from deepex.cli.progress import Bars
from deepex.cli.study_progress import Lines
from deepex.record import PlannedRun
from deepex.training.config import RunConfig

ODD = ("[/data]", "[bold]x[/bold]", "a:key:b", "[30, 60]")


@pytest.mark.parametrize("text", ODD)
def test_text_is_printed_as_it_is(text: str) -> None:
    printed, table = io.StringIO(), Table(title=text)
    table.add_column(text)
    table.add_row(f"cell {text}")
    console = make_console(file=printed, width=80)
    console.print(f"line {text}")
    console.print(table)
    assert f"line {text}" in printed.getvalue()
    assert printed.getvalue().count(text) == 4


@pytest.mark.parametrize("text", ODD)
def test_a_run_and_a_study_tell_a_reason_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Bars(make_console(width=80), RunConfig(net="lenet", data=text, batch=1, epochs=1)).ended("failed", f"{text} is full")
    planned = PlannedRun(name=text, command=("deepex", "train", "fashion"), ranks=1, repeat=1, varied={})
    lines = Lines()
    lines.began(None, [planned], 0)  # type: ignore[arg-type]  # it does not look at the study
    lines.run_began(planned)
    lines.run_ended(planned, "failed", f"{text} is full", 1.0)
    lines.closed()
    assert capsys.readouterr().out.count(f"failed: {text} is full") == 2


def test_every_verb_prints_so() -> None:
    sources = {path.name: path.read_text() for path in Path(deepex.cli.__file__).parent.glob("*.py")}
    assert [name for name, source in sources.items() if " Console(" in source] == ["output.py"]
