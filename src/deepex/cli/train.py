"""`deepex train`: start the ranks if asked to, then train."""

import json as json_module
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deepex.errors import INTERRUPTED, ConfigError, FailureError, told

_SHOW_CURSOR: Final = "\x1b[?25h"


def train(
    *,
    recipe: str | None,
    ranks: int | None,
    replicas: int | None,
    out: str | None,
    resume: str | None,
    assignments: Sequence[str],
    quiet: bool,
    as_json: bool,
    list_recipes: bool,
) -> None:
    """Do what the command line says; see `deepex.cli.train` for the options."""
    if list_recipes:
        _list_recipes()
        return
    if (recipe is None) == (resume is None):
        raise ConfigError("train takes a RECIPE or FILE.toml, or --resume DIR: one of them")
    if ranks is not None and ranks != _started_ranks():
        sys.exit(_launch(ranks))
    from deepex.comm.start import Start
    from deepex.machine.heap import loading

    start = Start.begin(os.environ)  # MPI before all that may fail on one rank alone, and before PyTorch
    target = Path(resume) if resume else out
    with loading():
        prepared = start.agree(
            lambda: _prepared(recipe, resume, replicas, assignments, target, quiet=quiet or as_json),
            os.environ,
            same=lambda made: made[-1],
        )
    config, train_run, watcher, _ = prepared
    try:
        run = train_run(config, out=target, resume=resume is not None, watcher=watcher)
    except SystemExit as error:  # of the network, say: the run is not done, whatever code it has
        raise FailureError(told(error)) from error
    if as_json and start.place.rank == 0:
        from deepex.cli.show import summary

        sys.stdout.write(json_module.dumps(summary(run)) + "\n")


def _prepared(
    recipe: str | None,
    resume: str | None,
    replicas: int | None,
    assignments: Sequence[str],
    target: Path | str | None,
    *,
    quiet: bool,
) -> Any:
    """The configuration, what trains it and watches, and what all ranks must have the same: what is loaded before they join."""
    sys.path.append(str(Path.cwd()))  # where `net=module:function` is looked up last: a random.py or torch.py there is not ours
    from deepex.machine.heap import keep_tensors

    keep_tensors(os.environ)  # before what follows loads PyTorch
    config = _config(recipe, resume, replicas, assignments)
    from deepex.cli.progress import make_watcher
    from deepex.recipes import train as train_run
    from deepex.training.gather import pick_device
    from deepex.training.same import started_with

    facts = started_with(config, pick_device(config.device, 0).type, resume=resume is not None, out=target)
    return config, train_run, make_watcher(config, quiet=quiet), facts


def _config(recipe: str | None, resume: str | None, replicas: int | None, assignments: Sequence[str]) -> Any:
    """Read the recipe, the file or the run to resume, with what the command line changes."""
    from deepex.recipes import find_config
    from deepex.record.table import parse_assignments

    changes = parse_assignments(assignments)
    if replicas is not None:
        changes["replicas"] = replicas
    if changes.get("threads", 0) == 0 and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        changes["threads"] = int(os.environ["OMP_NUM_THREADS"])  # the user's own choice for this job
    if resume is None:
        return find_config(recipe or "", changes)
    from deepex.record import RunDirectory
    from deepex.record.table import from_table, set_values
    from deepex.training.config import RunConfig

    return from_table(RunConfig, set_values(RunDirectory.open(Path(resume)).config, changes))


def _list_recipes() -> None:
    from deepex.recipes import RECIPES

    for name, function in RECIPES.items():
        sys.stdout.write(f"{name:<16} {(function.__doc__ or '').splitlines()[0]}\n")


def _started_ranks() -> int:
    """How many ranks a launcher has already started; 1 if we are alone."""
    from deepex.comm.place import find_place

    return find_place(os.environ).size


def _launch(ranks: int) -> int:
    """Start this same command on `ranks` ranks.

    They are told the terminal's width, or that there is none: what a launcher gives them may be a pipe where we have a terminal
    (MPICH), or a terminal where we have a log file (Open MPI).
    """
    from deepex.comm.launch import launch

    if _started_ranks() > 1:
        raise ConfigError(f"--ranks is {ranks}, but a launcher already started {_started_ranks()} ranks: leave --ranks out")
    columns = (os.get_terminal_size(sys.stdout.fileno()).columns or 80) if sys.stdout.isatty() else 0
    environ = {**os.environ, "DEEPEX_TERMINAL_COLUMNS": str(columns)}
    code = launch(ranks, [sys.executable, "-P", "-m", "deepex", *sys.argv[1:]], environ, joins=True)
    if columns and code:
        sys.stdout.write(_SHOW_CURSOR)  # a rank that was killed could not
        sys.stdout.flush()
    if code not in (0, 1, 2, INTERRUPTED):  # not ours: a rank was killed, and the launcher tells how in one way or another
        number = -code if code < 0 else code - 128 if code > 128 else code
        what = f"a rank was ended by signal {number}" if number <= 64 else "the ranks could not be started, or ended unexpectedly"
        sys.stderr.write(f"deepex: {what} (launcher's code {code}); a run that had begun continues with --resume RUN\n")
        return 1
    return code
