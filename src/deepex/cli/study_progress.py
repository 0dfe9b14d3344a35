"""What a person sees while a study runs: a line per run, and on a terminal a bar with the time left.

The time left starts from the plan's estimates and is corrected by what the runs really took.
"""

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from deepex.cli.output import make_console
from deepex.record import PlannedRun, StudyDirectory
from deepex.study import execute


class Lines(execute.Progress):
    """Prints on the terminal or into a log."""

    def __init__(self) -> None:
        self._console = make_console()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, left="")
        self._left: list[PlannedRun] = []
        self._taken = self._estimated = 0.0
        self._number = self._total = 0

    @override
    def began(self, study: StudyDirectory, todo: list[PlannedRun], done: int) -> None:
        self._left, self._number, self._total = list(todo), done, done + len(todo)
        if done:
            self._console.print(f"{done} of {self._total} runs had finished; going on with the rest")
        self._bar.update(self._task, total=self._total, completed=done)
        self._bar.start()

    @override
    def run_began(self, planned: PlannedRun) -> None:
        self._bar.update(self._task, description=planned.name, left=f"about {duration(self._remaining())} left")

    @override
    def run_ended(self, planned: PlannedRun, status: str, reason: str, seconds: float) -> None:
        self._left.remove(planned)
        self._number += 1
        if status == "finished":
            self._taken += seconds
            self._estimated += planned.estimate_seconds or seconds
        told = "" if status == "finished" else f"  {status}: {reason}"
        left = f"  about {duration(self._remaining())} left" if self._left else ""
        width = len(str(self._total))
        line = f"{self._number:>{width}}/{self._total}  {planned.name:<28} {duration(seconds):>8}{told}{left}"
        self._bar.console.print(line, soft_wrap=True)
        self._bar.update(self._task, completed=self._number)

    @override
    def closed(self) -> None:
        self._bar.stop()

    def _remaining(self) -> float:
        factor = self._taken / self._estimated if self._estimated else 1.0
        return factor * sum(planned.estimate_seconds or 0.0 for planned in self._left)


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
