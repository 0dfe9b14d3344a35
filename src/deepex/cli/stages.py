"""What a person sees while a dataset is made, packed or verified: a bar for each stage, and in a log file a line every half minute.

    with Stages() as stages:
        pack(source, out, progress=stages.tell)               # simulating ━━━━━━ 12000/27000 515 images/s 0:00:29

All of it goes to stderr: stdout is for the result alone.
"""

from time import perf_counter
from typing import Final, Literal, Self

from rich import progress
from rich.text import Text

from deepex.cli.output import make_console

_LINE_SECONDS: Final = 30
_UNITS: Final = {"images": (1.0, "images"), "bytes": (1e6, "MB")}


class Stages:
    """How far each stage is; nothing is shown unless `shown`. `kept`: what is said to somebody who interrupts the work."""

    def __init__(self, *, shown: bool = True, unit: Literal["images", "bytes"] = "images", kept: str = "") -> None:
        self._kept = kept
        self._per_unit, self._unit = _UNITS[unit]
        self._console = make_console(stderr=True, quiet=not shown)
        what = progress.TextColumn("{task.description}", markup=False)
        columns = [what, progress.BarColumn(), _Amount(self), progress.TimeRemainingColumn()]
        self._bar = progress.Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._tasks: dict[str, progress.TaskID] = {}
        self._began = self._told = perf_counter()
        self._before = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._bar.stop()
        if kind is KeyboardInterrupt and self._kept:
            self._console.print(self._kept, soft_wrap=True)

    def tell(self, what: str, done: int, total: int) -> None:
        """Note that `done` of `total` are through the stage called `what`."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, completed=done)
            self._began, self._before = perf_counter(), done
        self._bar.update(self._tasks[what], completed=done)
        if not self._console.is_terminal and perf_counter() - self._told >= _LINE_SECONDS:
            self._told = perf_counter()
            self._print_line(what, done, total)

    def amount(self, done: float, total: float | None, speed: float | None) -> str:
        """Words for what is done, of how much, and how fast."""
        of, rate = (total or 0) / self._per_unit, (speed or 0) / self._per_unit
        return f"{done / self._per_unit:,.0f} of {of:,.0f} {self._unit}" + (f", {rate:,.0f} {self._unit}/s" if rate else "")

    def _print_line(self, what: str, done: int, total: int) -> None:
        speed = (done - self._before) / max(self._told - self._began, 1e-9)
        left = f", {(total - done) / speed / 60:,.1f} minutes left" if speed else ""
        self._console.print(f"{what}: {self.amount(done, total, speed)}{left}", soft_wrap=True)


class _Amount(progress.ProgressColumn):
    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages

    def render(self, task: progress.Task) -> Text:
        return Text(self._stages.amount(task.completed, task.total, task.speed))
