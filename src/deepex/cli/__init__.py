"""`deepex VERB`: one file per verb, imported when the verb is used, so that `deepex --help` is instant.

A mistake that the caller can mend ends with one line and exit code 2, a failure with one line and exit code 1; neither shows a
traceback. DEEPEX_DEBUG=1 shows it.
"""

import os
import sys
from errno import EACCES, EIO, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EPIPE, EROFS
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from deepex.cli.output import HELP_NAMES, checked, drop, use_streams
from deepex.errors import INTERRUPTED, DeepexError, UserError, place_in_their_code, told

_NO_PATH: Final = (EACCES, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS)
_NO_STREAM: Final = (EIO, ENOSPC, EPIPE)
_MOST_SHOWN: Final = 100  # characters of a path

app = typer.Typer(
    name="deepex",
    help="Train deep networks natively on HPC machines, and measure what parallel training really gains.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": HELP_NAMES},
)

_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key, e.g. sync.period=16; may be repeated."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command("train")
def train_verb(  # noqa: PLR0917 - typer reads the options from the signature
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE|FILE.toml", help="A recipe's name (`--list` shows them) or a TOML file."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Start this many ranks on this machine. Under mpiexec, srun, jsrun or torchrun leave it out."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Copies of the network that learn on their own shards; a multiple of the ranks [default: ranks]."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", callback=checked, help="The run directory to write [default: runs/NET-TIME].")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", callback=checked, help="Continue the run in DIR from its last checkpoint.")
    ] = None,
    set_: _Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    json: _Json = False,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and end.")] = False,
) -> None:
    """Train a network: from a packed dataset to a run directory.

    For example:

      deepex train fashion --ranks 2

      deepex train fashion --ranks 4 --replicas 8 --set sync.period=16 --out runs/a

      mpiexec -n 4 deepex train fashion --set "target=validation error <= 0.15"

      deepex train --resume runs/a --ranks 2 --set epochs=20
    """
    _verb("train").train(
        recipe=recipe,
        ranks=ranks,
        replicas=replicas,
        out=out,
        resume=resume,
        assignments=set_ or [],
        quiet=quiet,
        as_json=json,
        list_recipes=list_,
    )


@app.command("show")
def show_verb(
    run: Annotated[str, typer.Argument(metavar="RUN|STUDY", help="A run or a study directory.")],
    base: Annotated[str | None, typer.Option(metavar="RUN", help="Compare with this run: speedup and efficiency.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Learning speedup to this target, e.g. 'validation error <= 0.2'; may be repeated."),
    ] = None,
    json: _Json = False,
) -> None:
    """Print a run: configuration, machine, phases per epoch, convergence; with --base, what it gained. Of a study, the verdicts.

    For example:

      deepex show runs/a

      deepex show runs/four --base runs/one --target "validation error <= 0.2"
    """
    _verb("show").show(run=run, base=base, targets=target or [], as_json=json)


@app.command("report")
def report_verb(  # noqa: PLR0917 - as above
    directories: Annotated[
        list[str],
        typer.Argument(metavar="DIR…", help="Run directories, study directories, or folders that hold some."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", callback=checked, help="The file to write [default: report.html].", show_default=False
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Over the page [default: the directories' names].", show_default=False)] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare two directories instead: what differs, with intervals, in a terminal.")
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(metavar="csv|mlperf|extrap", help="Write the records for other programs instead.", show_default=False),
    ] = None,
    json: _Json = False,
) -> None:
    """Make one self-contained HTML file of runs and studies: verdicts in words, the paper's figures, who is slow.

    The file needs no network and can be mailed, printed or put into a proposal. Runs of a study are compared as it planned them;
    others by what differs between them, ranks first.

    For example:

      deepex report runs/one-rank runs/two-ranks -o speedup.html

      deepex report studies/strong studies/sync -o proposal.html

      deepex report runs

      deepex report --compare runs/before runs/after

      deepex report studies/strong --export extrap -o strong.json
    """
    verb = _verb("report")
    if compare:
        verb.compare(directories=directories, as_json=json)
    elif export is not None:
        verb.export(directories=directories, kind=export, out=out)
    else:
        verb.report(directories=directories, out=out or "report.html", title=title, as_json=json)


@app.command("watch")
def watch_verb(
    directories: Annotated[list[str], typer.Argument(metavar="DIR…", help="Run and study directories, or folders that hold some.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on this machine; 0 for any that is free.")] = 0,
) -> None:
    """Serve the live report of running jobs to browsers on this machine: for a login node and a port forward.

    It prints an address with a token in it; who does not have that gets nothing. It reads records and changes nothing.

    For example:

      deepex watch runs --port 8765      # on the login node

      ssh -L 8765:localhost:8765 login   # on your laptop; then open the address there
    """
    _verb("watch").watch(directories=directories, port=port)


@app.command("doctor")
def doctor_verb(json: _Json = False) -> None:
    """Say what this machine has (MPI, NCCL, GPUs, cores, memory, file systems), what DeepEx would choose, and why."""
    _verb("doctor").doctor(json)


@app.command(
    name="data",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def data_verb(context: typer.Context) -> Any:
    """Make, pack, look at and verify datasets: `deepex data --help`."""
    return _verb("data").app(args=context.args, prog_name="deepex data", standalone_mode=False)  # the exit code, if there is one


@app.command(
    name="study",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def study_verb(context: typer.Context) -> Any:
    """Measure how training scales: strong, weak, sync, threads, variability, …: `deepex study --help`."""
    return _verb("study").app(args=context.args, prog_name="deepex study", standalone_mode=False)


def main() -> None:
    """Run the command line; every error that is ours becomes one line."""
    try:
        use_streams()
        _check_directory()
        code = app(prog_name="deepex", standalone_mode=False)
        sys.stdout.flush()
    except DeepexError as error:
        _fail(str(error), error.exit_code, agreed=error.agreed)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_PATH:
            _fail(f"the path {str(error.filename)[:_MOST_SHOWN]!r} cannot be used: {error.strerror}; give another", 2)
        message = getattr(error, "format_message", None)  # a usage error of the command line itself
        if message is not None:
            _fail(f"{message()}; see `deepex --help`", 2)
        if isinstance(error, OSError) and error.errno in _NO_STREAM and error.filename is None:
            drop(sys.stdout)
            _fail(f"what this prints cannot be written: {error.strerror}", 1)
        if "DEEPEX_DEBUG" in os.environ:
            raise
        report = "" if place_in_their_code(error) else ", please report it"
        _fail(f"{'unexpected ' if report else ''}{told(error)}; DEEPEX_DEBUG=1 shows the way there{report}", 1)
    if code == INTERRUPTED:  # typer has turned the interrupt into this code
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _check_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the directory that this was started in is gone: cd to one that is there") from None


def _fail(message: str, code: int, *, agreed: bool = False) -> None:
    from deepex.comm.deadline import fail

    fail(message, code, agreed=agreed)


def _verb(name: str) -> Any:
    return import_module(f"deepex.cli.{name}")
