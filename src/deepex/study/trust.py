"""What a study directory may make us do, whoever wrote it: a plan comes from a file, and its commands are run.

    check_commands(plan)             # our own programs alone, in the shape in which `deepex study` plans them
    check_study(study)               # these, no link that leads out of the study, no run that goes on with another's code
    refuse_foreign(study, old, new)  # what the file plans beyond this command brings no recipe, network or directory of its own

Everything that starts, deletes or writes by a plan asks here first.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from deepex.comm.selection import KINDS
from deepex.errors import ConfigError, RunError
from deepex.recipes import find_config
from deepex.record import PlannedRun, RunDirectory, StudyDirectory
from deepex.record.paths import CONTROL
from deepex.record.table import parse_assignments
from deepex.study.frameworks import FRAMEWORKS
from deepex.study.storage.copies import FORMATS

_KEY: Final = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.]*\s*")
_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?")
_SIZES: Final = re.compile(r"[0-9]{1,18}(,[0-9]{1,18})*")
_MOST_WORDS: Final = 200
_CODE_KEYS: Final = ("net", "net_options")


def check_commands(plan: Iterable[PlannedRun]) -> None:
    """Refuse a plan with a command that is none of ours."""
    for planned in plan:
        wrong = _wrong(planned.command, _SHAPES) or (planned.before and _wrong(planned.before, _BEFORE))
        if wrong:
            ours = ", ".join(" ".join(program) for program in (*_SHAPES, *_BEFORE))
            raise ConfigError(f"run {planned.name} cannot be started: {wrong}; a study runs {ours}, as `deepex study` plans them")


def check_study(study: StudyDirectory) -> None:
    """Refuse a study that would run, write or delete what is not of this study."""
    _refuse_links(study.path)
    plan = study.plan
    try:
        check_commands(plan)
    except ConfigError as error:
        raise RunError(f"{study.path / 'study.json'}: {error}; restore it or start a new study") from error
    for planned in plan:
        _refuse_other_code(study, planned)


def refuse_foreign(study: StudyDirectory, old: Sequence[PlannedRun], new: Sequence[PlannedRun]) -> None:
    """Refuse runs of the study that this command does not ask for, where they bring something that it does not name.

    A name in a file is enough to call a function (`net=module:function`) or to write into a directory.
    """
    named = {thing for planned in new for thing in _things(planned)}
    for planned in old:
        foreign = [thing for thing in _things(planned) if thing not in named]
        if foreign:
            raise RunError(
                f"{study.path} plans a run {planned.name} with {foreign[0]}, which this command does not name; repeat the command "
                "with which the study began, or choose another --out"
            )


def _things(planned: PlannedRun) -> Iterator[str]:
    """What a run brings from outside: its recipe, a network of the user's own, the directory that it copies to."""
    words = planned.command
    if words[0] == "deepex" or words[0] == "deepex.study.frameworks":
        yield f"the recipe {words[2]!r}"
    for text in _settings(words):
        key, _, value = text.partition("=")
        if key.strip().partition(".")[0] in _CODE_KEYS:
            yield f"{key.strip()}={value.strip()}"
    if planned.before:
        yield f"copies of {planned.before[1]!r} in {planned.before[2]!r}"


def _settings(words: Sequence[str]) -> list[str]:
    return [words[k + 1] for k, word in enumerate(words[:-1]) if word == "--set"]


def _refuse_links(path: Path) -> None:
    """Whoever follows a link that somebody put there would write or delete elsewhere; one within the study does no harm."""
    inside = path.resolve()
    for folder, folders, files in os.walk(path):
        for entry in (Path(folder) / name for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
                raise RunError(f"{entry} is a link to {os.readlink(entry)}, which is not in the study {path}; remove the link")


def _refuse_other_code(study: StudyDirectory, planned: PlannedRun) -> None:
    """A run goes on with its own configuration; a network in there that is the user's own must be the one that is planned."""
    path = study.run_path(planned)
    if planned.command[0] != "deepex" or not (path / "config.toml").is_file():
        return
    config = RunDirectory(path).config
    if ":" not in str(config.get("net")):
        return
    asked = find_config(planned.command[2], parse_assignments(_settings(planned.command)))
    if (config.get("net"), config.get("net_options", {})) != (asked.net, asked.net_options):
        raise RunError(
            f"{path / 'config.toml'} has net {config['net']!r} with {config.get('net_options', {})}, but the plan has "
            f"{asked.net!r} with {asked.net_options}; delete {path}, and the run begins anew"
        )


def _wrong(words: Sequence[str], shapes: "_Shapes") -> str:
    """What is wrong with a command, or nothing."""
    for program, check in shapes.items():
        if tuple(words[: len(program)]) == program:
            wrong = check(words[len(program) :])
            return f"{' '.join(program)}: {wrong}" if wrong else ""
    return f"{_short(' '.join(words[:2]))} is no program of a study"


def _training(words: Sequence[str]) -> str:
    """What is wrong with RECIPE and its settings, or nothing."""
    if not words:
        return "it names no recipe"
    recipe, *settings = words
    if recipe.startswith("-") or CONTROL.search(recipe):
        return f"{_short(recipe)} is no recipe"
    if len(settings) % 2:
        return f"{_short(settings[-1])} stands alone"
    for option, text in zip(settings[::2], settings[1::2], strict=True):
        key, equals, value = text.partition("=")
        if option != "--set" or not equals or not _KEY.fullmatch(key) or CONTROL.search(value):
            return f"{_short(f'{option} {text}')} is no --set KEY=VALUE"
    return ""


def _framework(words: Sequence[str]) -> str:
    if not words or words[0] not in FRAMEWORKS:
        return f"it names no framework: {', '.join(FRAMEWORKS)}"
    return _training(words[1:])


def _transfer(words: Sequence[str]) -> str:
    options = dict(zip(words[::2], words[1::2], strict=False))
    given = tuple(options)
    if len(words) % 2 or given not in (("--comm", "--seconds"), ("--comm", "--seconds", "--sizes")) or 2 * len(given) != len(words):
        return "it takes --comm KIND --seconds NUMBER, and --sizes BYTES,…"
    if options["--comm"] not in KINDS:
        return f"--comm is {_short(options['--comm'])}; there are {', '.join(KINDS)}"
    if not _NUMBER.fullmatch(options["--seconds"]):
        return f"--seconds is {_short(options['--seconds'])}, not a number above 0"
    if not _SIZES.fullmatch(options.get("--sizes", "8")):
        return f"--sizes is {_short(options['--sizes'])}, not numbers of bytes"
    return ""


def _copy(words: Sequence[str]) -> str:
    if len(words) != 3:
        return "it takes DATA DIRECTORY FORMAT"
    *paths, form = words
    for path in paths:
        if not path or path.startswith("-") or CONTROL.search(path):
            return f"{_short(path)} is no path"
    return "" if form in FORMATS else f"{_short(form)} is no format: {', '.join(FORMATS)}"


def _short(text: str) -> str:
    """A word in a message: it may be the whole file."""
    return repr(text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]}…")


_Shapes = dict[tuple[str, ...], Callable[[Sequence[str]], str]]
_SHAPES: Final[_Shapes] = {
    ("deepex", "train"): _training,
    ("deepex.study.frameworks",): _framework,
    ("deepex.study.transfer",): _transfer,
}
_BEFORE: Final[_Shapes] = {("deepex.study.storage",): _copy}
