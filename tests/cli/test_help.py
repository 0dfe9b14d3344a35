"""`-h` gives the help of every command, as `--help` does: a walk through all that typer knows."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from deepex.cli import app


def commands(of: typer.Typer, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of `of` itself and of all commands below it; a verb that hands its words on has an app in a file of its name."""
    yield words
    group: Any = get_command(of)
    for name, command in group.commands.items():
        if command.context_settings.get("ignore_unknown_options"):
            yield from commands(import_module(f"deepex.cli.{name}").app, *words, name)
        else:
            yield (*words, name)


COMMANDS = tuple(commands(app))


def test_the_walk_finds_them_all() -> None:
    verbs = {words[0] for words in COMMANDS if words}
    assert {"train", "data", "show", "report", "watch", "study", "doctor"} <= verbs
    assert {("data", "pack"), ("data", "make"), ("study", "strong"), ("study", "frameworks")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "deepex")
def test_h_gives_the_help(words: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*words, option], prog_name="deepex") for option in ("-h", "--help"))
    assert short.exit_code == 0, short.output
    assert short.output.startswith(f"Usage: {' '.join(('deepex', *words))} ")
    assert "-h, --help" in short.output
    assert short.output == long.output
