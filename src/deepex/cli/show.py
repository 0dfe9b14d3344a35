"""`deepex show`: a run in a terminal. Reads the run directory; needs no torch and no MPI."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepex.cli.output import make_console
from deepex.cli.usage import print_usage
from deepex.errors import RunError
from deepex.record import PHASES, EpochRecord, RunDirectory, Score, StudyDirectory, Target, is_study
from deepex.record.measure import LOSS, Measure
from deepex.speedup import Speedup, compare, epoch_seconds

_PAPER_NAMES = {
    "input": "IpUpdateTime",
    "forward": "FwdTime",
    "backward": "BwdTime",
    "update": "WtUpdateTime",
    "sync": "SyncTime",
    "compute": "TotalCompTime",
}


def show(*, run: str, base: str | None, targets: Sequence[str], as_json: bool) -> None:
    """Print a run or a study, or its summary as JSON."""
    if is_study(Path(run)):
        show_study(Path(run), base=base, targets=targets, as_json=as_json)
        return
    directory = RunDirectory.open(Path(run))
    goals = [Target.parse(text) for text in targets] or _own_target(directory)
    for goal in goals if base else ():
        goal.check(directory.measures(directory.epochs()), str(directory.config.get("task")))
    speedups = _speedups(directory, RunDirectory.open(Path(base)), goals) if base else []
    if targets and not base:
        raise RunError("--target needs --base RUN: a learning speedup compares two runs")
    if as_json:
        sys.stdout.write(json.dumps(summary(directory, speedups)) + "\n")
        return
    console = make_console()
    _print_head(console, directory)
    epochs = directory.epochs()
    if epochs:
        _print_epochs(console, epochs, directory.measures(epochs))
        print_phases(console, epochs)
        print_usage(console, epochs)
    for speedup in speedups:
        _print_speedup(console, speedup, base or "")


def show_study(path: Path, *, base: str | None, targets: Sequence[str], as_json: bool) -> None:
    """Print what the report of a study says in words."""
    from deepex.report.chapter import chapters
    from deepex.report.collect import collect

    if base or targets:
        raise RunError(
            f"{path} is a study, which has its own base and targets: leave --base and --target out, or give one of its runs"
        )
    told, study = chapters(collect([path]))[0], StudyDirectory.open(path)
    if as_json:
        problems = [row for table in told.tables for row in table.rows]
        words = [text for _heading, texts in told.items for text in texts]
        sys.stdout.write(json.dumps({"study": str(path), "state": study.state, "summary": words, "problems": problems}) + "\n")
        return
    console, state = make_console(), study.state
    head = (
        f"{study.kind} study of {state.get('recipe')}: {state.get('status')}{': ' + state['reason'] if state.get('reason') else ''}"
    )
    console.print(head, soft_wrap=True)
    for text in (*told.lead, *(f"- {text}" for _heading, texts in told.items for text in texts)):
        console.print(text)
    for table in told.tables:
        _print_table(console, table.title, table.columns, [list(map(str, row)) for row in table.rows])


def summary(run: RunDirectory, speedups: Sequence[Speedup] = ()) -> dict[str, Any]:
    """Everything that `show` prints, as plain values."""
    epochs = run.epochs()
    return {
        "run": str(run.path),
        "state": {**run.state, **dict(zip(("status", "reason"), run.outcome, strict=True))},
        "config": run.config,
        "epoch_seconds": epoch_seconds(epochs) if any(not e.partial for e in epochs) else None,
        "epochs": [asdict(epoch) for epoch in epochs],
        "speedups": [{**asdict(s), "per_epoch": s.per_epoch, "efficiency": s.efficiency, "learning": s.learning} for s in speedups],
    }


def phase_shares(epoch: EpochRecord) -> dict[str, float]:
    """Each phase's share of the epoch's time, over all ranks."""
    total = sum(epoch.wall) / len(epoch.wall)
    return {name: epoch.phase_seconds(name) / total for name in PHASES}


def score_text(score: Score, measures: Sequence[Measure]) -> str:
    """Loss and measures in a few characters."""
    found = ((measure, score.measures.get(measure.name)) for measure in measures)
    parts = [f"{measure.name} {measure.text(value)}" for measure, value in found if value is not None]
    return " ".join([f"loss {score.loss:.4f}", *parts])


def print_phases(console: Any, epochs: Sequence[EpochRecord]) -> None:
    """Seconds per epoch in each phase: mean over ranks and epochs, the slowest rank, the share; with the paper's names."""
    from rich.table import Table

    if not any(epoch.has_phases for epoch in epochs):
        console.print("phases are not told apart: this framework runs them into one another")
        return
    steady = [epoch for epoch in epochs if epoch.epoch > 1 and not epoch.partial] or list(epochs)
    count = len(steady)
    wall = sum(sum(epoch.wall) / len(epoch.wall) for epoch in steady) / count
    title = f"seconds per epoch, {steady[0].ranks} rank(s), {count} epoch(s)" + (
        ", the first left out" if steady != list(epochs) else ""
    )
    table = Table(title=title, title_justify="left")
    for column in ("phase", "in the paper", "mean of ranks", "slowest rank", "share"):
        table.add_column(column, justify="left" if column in ("phase", "in the paper") else "right")
    for name in (*PHASES, "compute"):
        mean = sum(epoch.phase_seconds(name) for epoch in steady) / count
        slowest = "" if name == "compute" else f"{max(_rank_means(steady, name)):.3f}"
        table.add_row(name, _PAPER_NAMES[name], f"{mean:.3f}", slowest, f"{mean / wall:.1%}", end_section=name == "sync")
    table.add_row("epoch", "", f"{wall:.3f}", f"{sum(e.seconds for e in steady) / count:.3f}", "100.0%")
    console.print(table)


def _rank_means(epochs: Sequence[EpochRecord], phase: str) -> list[float]:
    ranks = min(len(epoch.wall) for epoch in epochs)
    return [sum(epoch.phases[phase][rank] for epoch in epochs) / len(epochs) for rank in range(ranks)]


def _own_target(run: RunDirectory) -> list[Target]:
    text = run.config.get("target")
    return [Target.parse(str(text))] if text else []


def _speedups(run: RunDirectory, base: RunDirectory, targets: Sequence[Target]) -> list[Speedup]:
    goals: Sequence[Target | None] = targets or [None]
    return [compare(base.epochs(), run.epochs(), target) for target in goals]


def _print_head(console: Any, run: RunDirectory) -> None:
    state, config = run.state, run.config
    status, reason = run.outcome
    lines = [
        f"run        {run.path}: {status}{': ' + reason if reason else ''}",
        f"network    {config['net']}, {state['network']['parameters']:,} parameters; {config['task']}, {config['precision']}",
        f"data       {config['data']}: {', '.join(f'{count:,} {name}' for name, count in state['samples'].items())}",
        f"ranks      {state['ranks']} on {state['nodes']} node(s), {state['replicas']} replica(s), batch {config['batch']} each",
        f"comm       {state['comm']['kind']} ({state['comm']['reason']})",
        f"placement  {state['placement']['kind']} ({state['placement']['reason']})",
        f"optim      {_pairs(config['optim'])}",
        f"sync       {_pairs(config['sync'])} ({(state.get('sync') or {}).get('reason', 'asked for')})",
        f"seed       {config['seed']}{', deterministic' if config['deterministic'] else ''}",
    ]
    lines += [f"changed    {_changed_text(change)}" for change in state.get("changed", [])]
    lines += [f"machine    {_machine_text(machine)}; {state['threads']} thread(s) per rank" for machine in run.machine[:4]]
    console.print("\n".join(lines), soft_wrap=True)


def _changed_text(change: dict[str, Any]) -> str:
    """What is above is of the epochs since then."""
    step = f" and {change['step']} steps" if change.get("step") else ""
    keys = ", ".join(f"{key} {was!r} \N{RIGHTWARDS ARROW} {now!r}" for key, (was, now) in change.get("keys", {}).items())
    return f"after {change.get('epoch', 0)} epochs{step}, when it was resumed: {keys}"


def _machine_text(machine: dict[str, Any]) -> str:
    cpu, versions = machine.get("cpu") or {}, machine.get("versions") or {}
    gpus = [gpu.get("name") or "GPU" for gpu in machine.get("gpus") or []]
    parts = [
        str(machine.get("host")),
        f"{cpu.get('model') or cpu.get('architecture')}, {cpu.get('num_cores_usable')} core(s)",
        *gpus,
    ]
    return ", ".join(parts) + f"; torch {versions.get('torch')}, mpi4py {versions.get('mpi4py')}, deepex {versions.get('deepex')}"


def _pairs(table: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items())


def _print_epochs(console: Any, epochs: Sequence[EpochRecord], measures: Sequence[Measure]) -> None:
    names, shown = [measure.name for measure in measures if measure is not LOSS], _thinned(epochs)
    rows = [
        (
            _number(epoch),
            f"{epoch.train.loss:.4f}",
            *(_score(epoch.score(part, name)) for name in names for part in ("train", "validation")),
            f"{epoch.rate:.4g}",
            f"{epoch.samples / epoch.seconds:,.0f}",
        )
        for epoch in shown
    ]
    columns = ("epoch", "loss", *(word for name in names for word in (name, f"validation {name}")), "rate", "img/s")
    _print_table(console, "convergence", columns, rows)
    phases = PHASES if any(epoch.has_phases for epoch in epochs) else ()
    times = [
        (
            _number(epoch),
            *(f"{epoch.phase_seconds(name):.3f}" for name in phases),
            f"{epoch.seconds:.3f}",
            str(epoch.syncs),
        )
        for epoch in shown
    ]
    _print_table(
        console, f"seconds per {'phase, mean of ranks' if phases else 'epoch'}", ("epoch", *phases, "epoch takes", "syncs"), times
    )
    met = [
        (
            _number(epoch),
            str(epoch.syncs),
            f"{epoch.drift['all']:.2%}",
            f"{epoch.moved['all']:.2%}" if epoch.moved else "",
            epoch.period,
        )
        for epoch in shown
        if epoch.drift
    ]
    if met:
        _print_table(console, "how replicas met", ("epoch", "syncs", "drift", "moved", "period"), met)
    if lost := [f"{epoch.lost} in epoch {epoch.epoch}" for epoch in epochs if epoch.lost]:
        console.print(f"left out of a sync, because a replica had gone astray: {', '.join(lost)}")
    if any(epoch.partial for epoch in epochs):
        console.print("* resumed in its middle: its times do not cover all of it")


def _print_table(console: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "period" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _score(value: float | None) -> str:
    """A score, which an epoch may not have."""
    return "" if value is None else f"{value:.4f}"


def _number(epoch: EpochRecord) -> str:
    return f"{epoch.epoch}{'*' if epoch.partial else ''}"


def _thinned(epochs: Sequence[EpochRecord], most: int = 40) -> Sequence[EpochRecord]:
    """Every epoch of a short run; of a long one as many as fit on a screen, the last included."""
    stride = -(-len(epochs) // most)
    return [epoch for index, epoch in enumerate(epochs) if (len(epochs) - 1 - index) % stride == 0]


def _print_speedup(console: Any, speedup: Speedup, base: str) -> None:
    console.print(
        f"speedup    {speedup.per_epoch:.2f}x per epoch on {speedup.ranks} rank(s), base {base} on {speedup.base_ranks} rank(s) "
        f"({speedup.base_epoch_seconds:.3f} s → {speedup.epoch_seconds:.3f} s); efficiency {speedup.efficiency:.0%}",
        soft_wrap=True,
    )
    if speedup.target is None:
        return
    if speedup.learning is None:
        who = "the base" if speedup.base_epochs is None else "the run"
        console.print(f"learning   {speedup.target}: {who} did not reach it, so there is no learning speedup")
        return
    console.print(
        f"learning   {speedup.learning:.2f}x to {speedup.target} ({speedup.base_epochs} → {speedup.epochs} epochs); one run each: "
        "no evidence without repeats",
        soft_wrap=True,
    )
