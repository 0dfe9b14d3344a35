"""The processes that write the files of a dataset, one file each at a time.

    crew = Crew(images, form, reports=out / ".packing", workers=2)
    reports = crew.run(tasks, progress)

A file that is finished has its report in the directory `reports`, and is not written again by a later run, if it is still what the
report says. Files are forced to the disk by whoever writes the manifest, all together: waiting for each would cost a tenth of the
time. Workers are fresh processes, because most readers hold Python's lock while they decode; a worker dies with its parent.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from deepex.data.packing.form import Form
from deepex.data.packing.writer import FileReport, FileTask, write_file
from deepex.data.source.base import Images
from deepex.errors import ConfigError, FailureError, RunError
from deepex.record.files import read_json, write_atomic
from deepex.record.table import from_table

PackingProgress = Callable[[str, int, int], None]  # what is done, how many samples of it, of how many

STOP_NAME: Final = "stop"  # a rank that fails leaves it, so that the others do not work on for nothing
_POLL_SECONDS: Final = 0.2
_PR_SET_PDEATHSIG: Final = 1


@final
@dataclass(kw_only=True)
class WorkerPool:
    """Writes files of `images` in a `form`, on `workers` processes (1: on this one)."""

    images: Mapping[str, Images]
    form: Form
    reports: Path
    workers: int = 1

    def run(self, tasks: Sequence[FileTask], progress: Callable[[int], None]) -> None:
        """Write what is not there yet; `progress` is told the samples done so far, those of an earlier run included."""
        left = [task for task in tasks if self.finished(task, check=True) is None]
        done = sum(len(task.order) for task in tasks) - sum(len(task.order) for task in left)
        progress(done)
        portable = all(self.images[key].portable for key in {task.key for task in left})
        if min(self.workers, len(left)) > 1 and portable:
            self._run_workers(left, done, progress)
        else:
            self._run_here(left, done, progress)

    def finished(self, task: FileTask, *, check: bool = False) -> FileReport | None:
        """The report of a file that is finished.

        To `check` it is to read it, which finds what a loss of power has broken, and what was skipped and no longer may be.
        """
        with suppress(RunError, ConfigError, TypeError):  # it may hold anything, a list in place of a table too
            report = from_table(FileReport, read_json(self.reports / f"{task.stem}.json"))
            if not check or (_is_whole(report, task.directory) and (self.form.skip_bad or not report.bad)):
                return report
        return None

    def _run_here(self, tasks: list[FileTask], done: int, progress: Callable[[int], None]) -> None:
        count = done

        def advance(samples: int) -> None:
            nonlocal count
            count += samples
            progress(count)

        for task in tasks:
            if self._stopped():
                return
            _work(self.images, task, self.form, self.reports, advance)

    def _run_workers(self, tasks: list[FileTask], done: int, progress: Callable[[int], None]) -> None:
        context = multiprocessing.get_context("spawn")
        counter, stopped = context.Value("q", 0), context.Event()
        given = (os.getpid(), dict(self.images), self.form, self.reports, counter, stopped)
        pool = ProcessPoolExecutor(min(self.workers, len(tasks)), context, _begin, given)
        try:
            waiting = {pool.submit(_work_there, task) for task in tasks}
            while waiting:
                ended, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                progress(done + counter.value)
                _raise_first(ended)
                if self._stopped():
                    return
        except BrokenProcessPool as error:
            raise FailureError(
                "a worker process died while packing (out of memory, killed, or a reader crashed on a file); what is finished is "
                "kept: run the same command again, perhaps with --workers 1"
            ) from error
        finally:
            stopped.set()  # whoever is still at work ends after its block: a file may take minutes
            pool.shutdown(wait=True, cancel_futures=True)

    def _stopped(self) -> bool:
        return (self.reports / STOP_NAME).exists()


def _raise_first(ended: "set[Future[None]]") -> None:
    for future in ended:
        future.result()


def _work(images: Mapping[str, Images], task: FileTask, form: Form, reports: Path, advance: Callable[[int], None]) -> None:
    report = write_file(images[task.key], task, form, advance)
    text = json.dumps(asdict(report))
    write_atomic(reports / f"{task.stem}.json", lambda part: _write(part, text), flush=False)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _is_whole(report: FileReport, directory: Path) -> bool:
    if not report.count:
        return True
    labels = report.packed().labels
    return _sha256(directory / report.images) == report.images_sha256 and (
        labels is None or _sha256(directory / labels) == report.labels_sha256
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_here: tuple[Any, ...] = ()  # what a worker process was given when it began


def _begin(parent: int, *given: Any) -> None:
    global _here  # noqa: PLW0603 - a process pool hands its initialiser no other place
    _here = given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    with suppress(OSError, AttributeError):  # Linux: end when the parent does, however it ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended while this process began, so that no signal will come
        os._exit(1)


def _work_there(task: FileTask) -> None:
    images, form, reports, counter, stopped = _here

    def advance(samples: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with counter.get_lock():
            counter.value += samples

    _work(images, task, form, reports, advance)
