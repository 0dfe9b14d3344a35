"""Run a plan: one run after another, each a process of its own, as a person would start it.

    execute(study, watcher)         # what has finished stays; what was interrupted goes on from its checkpoint

Runs share nothing but the machine: no warm caches of a library, no leftover memory. A run that fails is noted with its reason, and
the next one begins; an interrupt goes to the run at hand, which writes its checkpoint, and ends the study, to be continued. A study
that was killed leaves its run at work: who goes on waits for that one, and does not begin it twice. A study may come from somebody
else: nothing is begun, written or deleted before `check_study` (trust.py) has found it to be as ours are.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import IO, Final

from deepex.errors import RunError
from deepex.record import PlannedRun, RunDirectory, StudyDirectory
from deepex.record.files import write_json
from deepex.record.run import hold, is_held
from deepex.study.trust import check_study, refuse_foreign

_LOOK_SECONDS: Final = 0.5
_LOG_TAIL: Final = 20  # lines of a failed run's log that may tell why


class Progress:
    """What a person is shown of a study; this one shows nothing."""

    def began(self, study: StudyDirectory, todo: list[PlannedRun], done: int) -> None:
        """The study starts or goes on."""

    def run_began(self, planned: PlannedRun) -> None:
        """A run starts."""

    def run_ended(self, planned: PlannedRun, status: str, reason: str, seconds: float) -> None:
        """A run has ended."""

    def closed(self) -> None:
        """Nothing more will come."""


@dataclass
class _Child:
    """The process of the run at hand, the signal that is to reach it, and whether it was sent."""

    process: subprocess.Popen[bytes] | None = None
    received: str | None = None
    told: bool = False

    def hand_on(self) -> None:
        """Send the process the signal, if there is one already."""
        if self.process is not None and self.received:
            self.told = True
            self.process.send_signal(signal.Signals[self.received])

    def catch_up(self) -> None:
        """Hand on what came while the process was being started."""
        if not self.told:
            self.hand_on()


def execute(study: StudyDirectory, environ: Mapping[str, str], progress: Progress | None = None) -> str:
    """Run what the plan has left; gives the study's status: `finished`, `stopped` by a signal, or `failed` where some runs did."""
    progress = progress or Progress()
    check_study(study)
    with hold(study.path), _handing_on() as child:
        plan = study.plan
        todo = [planned for planned in plan if study.status(planned) != "finished"]
        study.set_state(status="running", reason="")
        progress.began(study, todo, len(plan) - len(todo))
        try:
            for planned in todo:
                progress.run_began(planned)
                began = perf_counter()
                _let_end(study.run_path(planned), child)
                code = _run(study, planned, environ, child) if study.status(planned) != "finished" else 0
                status = _settle(study, planned, code, interrupted=child.received is not None)
                progress.run_ended(planned, status, study.reason(planned), perf_counter() - began)
                if child.received:
                    break
        finally:
            progress.closed()
        return _end(study, child.received)


def _end(study: StudyDirectory, received: str | None) -> str:
    failed = [planned.name for planned in study.plan if study.status(planned) == "failed"]
    if received:
        status, reason = "stopped", f"stopped by {received}; the same command goes on"
    elif failed:
        status, reason = "failed", f"{len(failed)} of {len(study.plan)} runs failed, first {failed[0]}: {_first_reason(study)}"
    else:
        status, reason = "finished", f"{len(study.plan)} run{'s' if len(study.plan) != 1 else ''} done"
    study.set_state(status=status, reason=reason)
    return status


def _first_reason(study: StudyDirectory) -> str:
    return next((study.reason(planned) for planned in study.plan if study.status(planned) == "failed"), "")


def _let_end(path: Path, child: _Child) -> None:
    """Wait for a run that still trains, as it does where its study was killed."""
    while is_held(path) and not child.received:
        sleep(_LOOK_SECONDS)


def _run(study: StudyDirectory, planned: PlannedRun, environ: Mapping[str, str], child: _Child) -> int:
    """Start a run, or let one go on that has a checkpoint, and wait for its end."""
    if child.received:
        return 0
    path = study.run_path(planned)
    (path / "failure.json").unlink(missing_ok=True)
    command = command_of(planned, path)
    if _goes_on(planned, path):
        command = [*_python("deepex"), "train", "--resume", str(path), "--ranks", str(planned.ranks), "--quiet"]
    elif path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    with (path / "log.txt").open("ab") as log:
        before = [*_python(planned.before[0]), *planned.before[1:], "--out", str(path)] if planned.before else []
        return (_wait(before, environ, log, child) if before else 0) or _wait(command, environ, log, child)


def _wait(command: list[str], environ: Mapping[str, str], log: IO[bytes], child: _Child) -> int:
    if child.received:
        return 0
    child.process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,  # an interrupt reaches it through us, once
    )
    child.catch_up()
    try:
        return child.process.wait()
    finally:
        child.process = None


def command_of(planned: PlannedRun, out: Path) -> list[str]:
    """The whole command line of a run on this machine."""
    if planned.command[0] == "deepex":
        return [*_python("deepex"), *planned.command[1:], "--ranks", str(planned.ranks), "--quiet", "--out", str(out)]
    return [*_python("deepex.comm.on_ranks"), str(planned.ranks), *planned.command, "--out", str(out)]


def _python(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]  # -P: a file of the current directory is no module of the library


def _goes_on(planned: PlannedRun, path: Path) -> bool:
    """Whether a run was interrupted where it can go on."""
    return planned.command[0] == "deepex" and (path / "run.json").is_file() and any((path / "checkpoints").glob("*.json"))


def _settle(study: StudyDirectory, planned: PlannedRun, code: int, *, interrupted: bool) -> str:
    """Note a failure that the run could not note itself; drop the checkpoints of one that has finished.

    A run that was interrupted where it cannot go on has not failed: it begins anew next time. One that somebody else runs is left.
    """
    path = study.run_path(planned)
    status = study.status(planned)
    if status == "finished":
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
    elif interrupted and is_held(path):
        status = "stopped"
    elif interrupted and not _goes_on(planned, path):
        shutil.rmtree(path, ignore_errors=True)
        status = "stopped"
    elif status not in ("stopped", "failed"):
        reason = _said(path / "log.txt") or f"ended with code {code}"
        write_json(path / "failure.json", {"reason": reason})
        if (path / "run.json").is_file():
            RunDirectory(path).set_state(status="failed", reason=reason)
        status = "failed"
    return status


def _said(log: Path) -> str:
    """What a run said last of its trouble."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:] if log.is_file() else []
    own = [line.removeprefix("deepex: ") for line in lines if line.startswith("deepex:")]
    return own[-1] if own else (lines[-1] if lines else "")


@contextmanager
def _handing_on() -> Iterator[_Child]:
    """Hand SIGINT and SIGTERM on to the run at hand, which ends well by them."""
    child = _Child()

    def hand_on(number: int, _frame: FrameType | None) -> None:
        child.received = signal.Signals(number).name
        child.hand_on()

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_other(study: StudyDirectory, plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan to go on with: the study's own, with what is new in `plan`; a study of something else is refused."""
    check_study(study)
    old = {planned.name: planned for planned in study.plan}
    new = {planned.name: planned for planned in plan}
    for name in old.keys() & new.keys():
        if (old[name].command, old[name].ranks) != (new[name].command, new[name].ranks):
            raise RunError(
                f"{study.path} holds a study whose run {name} is `{' '.join(old[name].command)}`, not "
                f"`{' '.join(new[name].command)}`; repeat the command with which it began, or choose another --out"
            )
    if not old.keys() & new.keys():
        raise RunError(f"{study.path} holds another study ({study.kind}); choose another --out")
    refuse_foreign(study, [planned for name, planned in old.items() if name not in new], plan)
    return [*old.values(), *(planned for name, planned in new.items() if name not in old)]
