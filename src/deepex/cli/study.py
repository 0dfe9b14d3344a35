"""`deepex study KIND RECIPE`: plan runs that vary something, run them, and keep what a report needs.

deepex study strong fashion --ranks 1,2,4 --out studies/strong
deepex study sync fashion --ranks 4 --to-target "validation error <= 0.2" --out studies/sync --dry-run
"""

import inspect
import json as json_module
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from deepex.cli.output import HELP_NAMES, checked, make_console
from deepex.errors import ConfigError

if TYPE_CHECKING:  # at run time they are imported where they are used, so that `deepex --help` stays instant
    from deepex.record import PlannedRun, StudyDirectory
    from deepex.study.kinds import Kind, Subject
    from deepex.study.plan import Request

app = typer.Typer(
    name="study",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": HELP_NAMES},
    help="""Measure how training scales: plan runs that vary one thing, run each several times in turns, and keep the records.

    Every kind shows its plan and what it will cost first; --dry-run ends there. What has finished is kept: after an interrupt the
    same command goes on, and with more --repeats it adds to what is there. `deepex report DIR` shows the result.
    """,
)


class Growing(StrEnum):
    """What grows with the ranks in a weak study."""

    data = "data"
    batch = "batch"


Ranks = Annotated[str, typer.Option(help="Numbers of ranks, with commas.")]
OneRanks = Annotated[int, typer.Option(min=1, help="How many ranks.")]
ToTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--to-target",
        metavar="TARGET",
        help="Train until this is reached, and measure learning speedup to it: 'validation error <= 0.2'. May be repeated.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every kind of study is asked; each field is an option."""

    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.toml", help="A recipe (`deepex train --list`) or a TOML file.")]
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=checked,
            help="The study to write, or to go on with [default: studies/KIND].",
            show_default=False,
        ),
    ] = None
    repeats: Annotated[int, typer.Option(help="Runs of each setting, each with a seed of its own; 3 or more give an interval.")] = 3
    epochs: Annotated[
        int | None,
        typer.Option(help="Of each run [default: 4, the first of which warms up; with a target the recipe's].", show_default=False),
    ] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration in every run.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost, and end.")] = False
    script: Annotated[
        str | None,
        typer.Option(metavar="slurm|lsf|pbs", help="Write job scripts for a batch system, and end.", show_default=False),
    ] = None
    header: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines for each job script: account, queue, modules.", show_default=False),
    ] = None
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Of job scripts.")] = 1
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False

    def request(self, targets: Sequence[str] | None) -> "Request":
        """What is studied, how often and how long."""
        from deepex.study.plan import Request

        return Request(
            recipe=self.recipe,
            settings=tuple(self.settings or ()),
            repeats=self.repeats,
            epochs=self.epochs,
            targets=tuple(targets or ()),
        )


def _command(ask: Callable[..., "Kind"]) -> None:
    """Make a command of a function from its own options to a kind of study: RECIPE and the common options are added to them."""

    def run(**given: Any) -> None:
        common = Common(**{field.name: given.pop(field.name) for field in fields(Common)})
        targets = given.pop("to_target", None)
        _study(ask(**given), common, common.request(targets))

    hints = get_type_hints(Common, include_extras=True)
    keyword, required = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    defaults = {field.name: required if field.default is MISSING else field.default for field in fields(Common)}
    shared = [inspect.Parameter(name, keyword, default=default, annotation=hints[name]) for name, default in defaults.items()]
    own = [parameter.replace(kind=keyword) for parameter in inspect.signature(ask).parameters.values()]
    targets = [inspect.Parameter("to_target", keyword, default=None, annotation=ToTarget)]
    signature = inspect.Signature([*shared[:2], *own, *targets, *shared[2:]])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it; mypy knows no such attribute of functions
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    run.__doc__ = ask.__doc__
    app.command(ask.__name__)(run)


@_command
def strong(
    ranks: Ranks = "1,2,4",
    total_batch: Annotated[
        int, typer.Option(help="Share this batch among the ranks [default: each rank keeps its own].", show_default=False)
    ] = 0,
) -> "Kind":
    """Ranks at fixed total work: per-epoch speedup, efficiency, phases; with --to-target, learning speedup.

    deepex study strong fashion --ranks 1,2,4 --to-target "validation error <= 0.2" --out studies/strong
    """
    from deepex.study.kinds import Strong

    return Strong(ranks=_numbers("--ranks", ranks), total_batch=total_batch)


@_command
def weak(
    ranks: Ranks = "1,2,4",
    grow: Annotated[Growing, typer.Option(help="What grows with the ranks.")] = Growing.data,
) -> "Kind":
    """Ranks with the data or the batch growing in proportion: weak efficiency, and validation error at equal epochs.

    deepex study weak fashion --ranks 1,2,4 --grow batch --out studies/weak
    """
    from deepex.study.kinds import Weak

    return Weak(ranks=_numbers("--ranks", ranks), grow=grow.value)


@_command
def sync(
    ranks: OneRanks = 2,
    strategies: Annotated[str, typer.Option(help="Of sync.strategy, with commas.")] = "gradients,weights,background,auto",
    periods: Annotated[str, typer.Option(help="Of sync.period, with commas; for the strategies that have one.")] = "1,8,64,epoch",
) -> "Kind":
    """Strategies and periods of synchronisation: the frontier of per-epoch speedup and epochs to the target.

    Without --to-target, and without a target in the recipe, one is chosen afterwards that every setting reached.

    deepex study sync fashion --ranks 4 --periods 1,16,epoch --to-target "validation error <= 0.2" --out studies/sync
    """
    from deepex.study.kinds import Sync

    return Sync(ranks=ranks, strategies=_words(strategies), periods=_words(periods))


@_command
def threads(
    threads: Annotated[str, typer.Option(help="Of each rank, with commas [default: powers of 2].", show_default=False)] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas [default: powers of 2].", show_default=False)] = "",
    crowd: Annotated[bool, typer.Option("--crowd", help="Also run what needs more cores than there are.")] = False,
) -> "Kind":
    """Threads × ranks × kernels (oneDNN on or off, channels-last or not): which setting gets most out of a node.

    deepex study threads fashion --threads 1,2 --out studies/threads
    """
    from deepex.study.kinds import Threads

    return Threads(threads=_numbers("--threads", threads), ranks=_numbers("--ranks", ranks), crowd=crowd)


@_command
def variability(
    ranks: OneRanks = 2,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; each is repeated.")] = 3,
) -> "Kind":
    """Repeats and seeds: how epoch times differ by rank and run, how accuracy does; who is slow.

    deepex study variability fashion --ranks 4 --seeds 5 --out studies/variability
    """
    from deepex.study.kinds import Variability

    return Variability(ranks=ranks, seeds=seeds)


@_command
def storage(
    directories: Annotated[
        str, typer.Option(help="Directories to read from, with commas: node-local, shared, in memory. They must be there.")
    ] = "runs,/dev/shm",
    placements: Annotated[str, typer.Option(help="Of host, stream, device; with commas.")] = "host,stream",
    formats: Annotated[str, typer.Option(help="Of packed, hdf5, hdf5-gzip; with commas.")] = "packed,hdf5",
    ranks: OneRanks = 2,
) -> "Kind":
    """Each placement and format from each directory: rates of the first epoch and of later ones, opens, bytes, time lost to input.

    deepex study storage fashion --directories /scratch/me,/dev/shm --out studies/storage
    """
    from deepex.study.kinds import Storage

    return Storage(directories=_words(directories), placements=_words(placements), formats=_words(formats), ranks=ranks)


@_command
def transfer(
    ranks: OneRanks = 4,
    comms: Annotated[
        str,
        typer.Option(
            help="Of mpi, gloo, nccl; with commas [default: mpi,gloo, and nccl with a GPU for each rank].", show_default=False
        ),
    ] = "",
    sizes: Annotated[str, typer.Option(help="Bytes, with commas [default: 8 to 64 MiB].", show_default=False)] = "",
    seconds: Annotated[float, typer.Option(help="For each size of each path.")] = 0.3,
) -> "Kind":
    """Bandwidth and latency: within memory, from rank to rank, host to device, all-reduce; over sizes, for each communicator.

    deepex study transfer fashion --ranks 4 --out studies/transfer
    """
    from deepex.study.kinds import Transfer

    return Transfer(ranks=ranks, comms=_words(comms), sizes=_numbers("--sizes", sizes), seconds=seconds)


@_command
def frameworks(
    ranks: OneRanks = 2,
    names: Annotated[
        str,
        typer.Option(
            help="Of deepex, deepex-gradients, pytorch, lightning, jax, keras; with commas [default: all installed].",
            show_default=False,
        ),
    ] = "",
) -> "Kind":
    """The same network, data and batch on DeepEx and on others (pip install 'deepex[peers]'): images/s, time to target, memory.

    deepex study frameworks fashion --ranks 2 --to-target "validation error <= 0.2" --out studies/frameworks
    """
    from deepex.study.kinds import Frameworks

    return Frameworks(ranks=ranks, names=_words(names))


def _study(kind: "Kind", common: Common, request: "Request") -> None:
    """Plan, show, and run or write scripts."""
    from deepex.study.plan import make_plan, open_subject

    header = _check_here(kind, common)
    subject, out = open_subject(request), common.out or Path("studies") / kind.name
    plan = _estimated(make_plan(kind, subject, request), subject, request, out)
    if not common.json:
        _print_plan(kind, subject, plan)
    if common.dry_run:
        if common.json:
            sys.stdout.write(json_module.dumps(_summary(kind, plan)) + "\n")
        return
    study = _open(kind, out, request, plan)
    if common.script is not None:
        from deepex.machine import probe_mpi
        from deepex.study.script import Batch, JobEnvironment, write_scripts

        minutes = 10 + round(2 * max(planned.estimate_seconds or 0 for planned in plan) / 60)
        batch = Batch(ranks_per_node=common.ranks_per_node, minutes=minutes, lines=header)
        submit = write_scripts(study, common.script, batch, JobEnvironment.here(probe_mpi(), os.environ))
        sys.stdout.write(f"{len(plan)} job scripts; look at them, then submit all with: sh {submit}\n")
        return
    _run(study, as_json=common.json)


def _check_here(kind: "Kind", common: Common) -> tuple[str, ...]:
    """Refuse what cannot work before anything is written, and read the header of job scripts.

    What a job finds on its node need not be here.
    """
    if common.script is None:
        kind.check_here()
        return ()
    from deepex.study.script import check_system

    check_system(common.script)
    try:
        return tuple(common.header.read_text(encoding="utf-8").splitlines()) if common.header else ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--header is {str(common.header)!a}, which cannot be read ({error}); give a text file with lines for job scripts"
        ) from error


def _estimated(plan: "list[PlannedRun]", subject: "Subject", request: "Request", out: Path) -> "list[PlannedRun]":
    """The plan with what each run is thought to take; of a study that goes on, as it was thought before."""
    from deepex.record import StudyDirectory, is_study
    from deepex.study.estimate import with_estimates

    known = {planned.name: planned for planned in StudyDirectory.open(out).plan} if is_study(out) else {}
    if all(planned.name in known for planned in plan):
        return [replace(planned, estimate_seconds=known[planned.name].estimate_seconds) for planned in plan]
    return with_estimates(plan, subject, request)


def _run(study: "StudyDirectory", *, as_json: bool) -> None:
    from deepex.cli.study_progress import Lines
    from deepex.study.execute import Progress, execute

    status = execute(study, os.environ, Progress() if as_json else Lines())
    state = study.state
    if as_json:
        sys.stdout.write(json_module.dumps({"study": str(study.path), "status": status, "reason": state["reason"]}) + "\n")
    else:
        sys.stdout.write(f"{status}: {state['reason']}\nlook at it with: deepex report {study.path}\n")
    sys.exit({"finished": 0, "stopped": 0}.get(status, 1))


def _open(kind: "Kind", out: Path, request: "Request", plan: "list[PlannedRun]") -> "StudyDirectory":
    """Begin a study, or go on with one."""
    from deepex.machine import describe
    from deepex.record import StudyDirectory, is_study
    from deepex.study.execute import refuse_other

    if is_study(out):
        study = StudyDirectory.open(out)
        study.set_state(plan=[asdict(planned) for planned in refuse_other(study, plan)])
        return study
    return StudyDirectory.create(
        out,
        plan=plan,
        machine=[describe(out.parent, os.environ)],
        kind=kind.name,
        recipe=request.recipe,
        settings=list(request.settings),
        options=asdict(kind),  # type: ignore[call-overload]  # every kind is a dataclass
        targets=list(request.targets),
        reason="",
    )


def _summary(kind: "Kind", plan: "list[PlannedRun]") -> dict[str, Any]:
    total = sum(planned.estimate_seconds or 0 for planned in plan)
    return {"kind": kind.name, "estimate_seconds": total, "plan": [asdict(planned) for planned in plan]}


def _print_plan(kind: "Kind", subject: "Subject", plan: "list[PlannedRun]") -> None:
    from rich.table import Table

    from deepex.cli.study_progress import duration

    console, settings = make_console(), [planned for planned in plan if planned.repeat == 1]
    repeats = max(planned.repeat for planned in plan)
    table = Table(title=f"{kind.name} study of {subject.recipe}: {len(plan)} runs", title_justify="left")
    for column in (*settings[0].varied, "repeats", "each about"):
        table.add_column(column, justify="right")
    for planned in settings:
        table.add_row(*map(str, planned.varied.values()), str(repeats), duration(planned.estimate_seconds or 0))
    console.print(table)
    total = sum(planned.estimate_seconds or 0 for planned in plan)
    console.print(f"about {duration(total)} in all, guessed from a few batches on one rank")
    for note in kind.notes(subject):
        console.print(f"note: {note}", soft_wrap=True)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; it takes whole numbers with commas between them, for example 1,2,4") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
