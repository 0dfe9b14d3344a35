"""What a person sees while a run trains: a bar per epoch, a line per epoch, a table at the end.

On a terminal the bar moves with the steps; in a log file there is a line per epoch and nothing else.
"""

import os
import sys
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typing_extensions import override

from deepex.cli.output import Lasting, make_console
from deepex.cli.show import phase_shares, print_phases, score_text
from deepex.record import EpochRecord
from deepex.record.measure import Measure
from deepex.record.table import from_table
from deepex.training.config import RunConfig
from deepex.training.watch import Watcher


def make_watcher(config: RunConfig, *, quiet: bool) -> Watcher:
    """Bars and lines, or silence."""
    if quiet:
        return Watcher()
    columns = os.environ.get("DEEPEX_TERMINAL_COLUMNS")
    options: dict[str, Any] = {}
    if columns is not None:
        options = {"force_terminal": False} if columns == "0" else {"force_terminal": True, "width": int(columns)}
    return Bars(make_console(file=Lasting(sys.stdout), **options), config)  # a run does not end because nobody reads along


class Bars(Watcher):
    """Draws on `console`, at most five times a second and from the training thread: no other thread competes for its core."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console, self._config = console, config
        self._epochs: list[EpochRecord] = []
        self._path = ""
        self._ranks, self._measures = 1, list[Measure]()
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]:>3}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}% {task.fields[speed]:>9,.0f} img/s"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._seen, self._began, self._drawn = 0, 0.0, 0.0

    @override
    def began(self, state: dict[str, Any]) -> None:
        self._ranks = state["ranks"]
        self._measures = [from_table(Measure, table) for table in state.get("measures", [])]
        parameters = state["network"]["parameters"]
        self._console.print(
            f"{self._config.net} ({parameters:,} parameters) on {self._config.data}: {state['replicas']} replica(s) on "
            f"{state['ranks']} rank(s), {state['comm']['kind']} on {state['device']}, {state['threads']} thread(s) each, "
            f"samples on {state['placement']['kind']}",
        )
        self._bar.start()

    @override
    def epoch_began(self, epoch: int, samples: int) -> None:
        self._seen, self._began = 0, perf_counter()
        if self._bar.disable:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=samples, epoch=epoch, speed=0.0)

    @override
    def stepped(self, samples: int) -> None:
        self._seen += samples
        if self._task is None:
            return
        now = perf_counter()
        if now - self._drawn > 0.2:
            self._drawn = now
            speed = self._ranks * self._seen / max(now - self._began, 1e-9)
            self._bar.update(self._task, completed=self._seen, speed=speed, refresh=True)

    @override
    def epoch_ended(self, epoch: EpochRecord) -> None:
        self._epochs.append(epoch)
        shares = "  ".join(f"{name} {share:.0%}" for name, share in phase_shares(epoch).items())
        validation = f"  validation {score_text(epoch.validation, self._measures)}" if epoch.validation else ""
        lost = f"  | {epoch.lost} × a replica that had gone astray was left out" if epoch.lost else ""
        self._bar.console.print(
            f"epoch {epoch.epoch:>3}/{self._config.epochs}  {epoch.samples / epoch.seconds:>8,.0f} img/s  "
            f"{score_text(epoch.train, self._measures)}{validation}  | {shares}{lost}",
            soft_wrap=True,
        )

    @override
    def ended(self, status: str, reason: str) -> None:
        self.closed()
        if self._epochs:
            print_phases(self._console, self._epochs)
        self._console.print(f"{status}: {reason}")

    @override
    def closed(self) -> None:
        self._bar.stop()
