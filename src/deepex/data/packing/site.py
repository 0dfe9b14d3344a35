"""The directory in which a dataset is made, and the ranks that make it together.

    site = Site(out, comm)                               # comm None: one rank
    with site.at_work():
        source = site.find(lambda: open_source(path))            # rank 0 looks, then the others
        site.prepare(plan.digest, inputs, overwrite=False)       # or go on where the same plan was interrupted
        reports = site.run(crew, tasks, "packing", progress)
        manifest = site.finish(make_manifest)

Rank 0 looks first and prepares the site, which it locks against other packings where the file system has locks; each file is
written by one rank.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, final

from deepex.data.manifest import FILE_NAME, MARKER_NAME, Manifest, load, save
from deepex.data.packing.workers import STOP_NAME, PackingProgress, WorkerPool
from deepex.data.packing.writer import FileReport, FileTask
from deepex.data.source.base import Source
from deepex.errors import DataError, RunError
from deepex.record.files import flush_file, read_json, storage_error, write_json

if TYPE_CHECKING:
    from deepex.comm import Communicator

_OWN_NAME: Final = re.compile(
    r"\.?(train|validation)-\d{5,}(-labels)?\.npy(\.xz)?(\.part)?|\.manifest\.json\.part|\.?skipped\.txt(\.part)?"
)
_PLAN_NAME: Final = "plan.json"
T = TypeVar("T")


@final
class Site:
    """The directory `out`; `scratch` within it holds what is finished until the manifest is written.

    `first` is done by rank 0 when it has locked `out`, before anything in there is removed.
    """

    def __init__(self, out: Path, comm: "Communicator | None" = None, *, first: Callable[[], None] | None = None) -> None:
        self.out, self.scratch = out, out / MARKER_NAME
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._rank, self._size = (0, 1) if self._comm is None else (self._comm.rank, self._comm.size)
        self._first = first
        self._locked = ExitStack()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Whatever happens within, no rank waits for one that has failed, and the directory is not left locked."""
        with self._locked:
            if self._comm is None:
                yield
                return
            from deepex.comm.together import abort_on_failure

            with abort_on_failure(self._comm, lambda text: print(f"deepex: {text}", file=sys.stderr, flush=True), lambda _: None):
                yield

    def find(self, look: Callable[[], Source]) -> Source:
        """Let rank 0 look, then the others: a mistake is found once, and only directories are listed by all."""
        found = self._together(lambda: look() if self._rank == 0 else None)
        source = self._together(lambda: found or look())
        assert source is not None
        return source

    def prepare(self, digest: Callable[[], str], inputs: Sequence[Path], *, overwrite: bool) -> None:
        """Make `out` a directory in which a packing has begun; what an earlier one with the same plan has finished stays."""

        def work() -> None:
            if self._rank == 0:
                self._check(inputs, overwrite=overwrite)
                self._lock()
                if self._first is not None:
                    self._first()
                self._begin(digest())

        self._together(work)

    def run(self, pool: WorkerPool, tasks: list[FileTask], what: str, progress: PackingProgress | None) -> dict[str, FileReport]:
        """Write all files, this rank its share of them; give the reports of all by their stems."""
        mine = tasks[self._rank :: self._size]
        total = sum(len(task.order) for task in tasks)
        share = sum(len(task.order) for task in mine)

        def tell(done: int) -> None:
            if progress is not None:  # rank 0 speaks for all: its share is drawn evenly from the whole
                progress(what, total if done == share else round(done * total / max(share, 1)), total)

        self._together(lambda: self._attempt(pool, mine, tell))
        found = {task.stem: pool.finished(task) for task in tasks}
        self._together(lambda: self._flush(mine, found))
        missing = [stem for stem, report in found.items() if report is None]
        if missing:
            raise DataError(f"{self.out} lost {missing[0]} while it was packed; is another packing running there? Run it again")
        return {stem: report for stem, report in found.items() if report is not None}

    def finish(self, summarise: Callable[[], Manifest]) -> Manifest:
        """Write the manifest; from then on `out` is a dataset."""

        def work() -> None:
            if self._rank == 0:
                save(self.out, summarise())
                shutil.rmtree(self.scratch, ignore_errors=True)

        self._together(work)
        return load(self.out)

    def _attempt(self, pool: WorkerPool, mine: list[FileTask], tell: Callable[[int], None]) -> None:
        try:
            pool.run(mine, tell)
        except BaseException:
            if self._comm is not None:
                (self.scratch / STOP_NAME).touch()
            raise

    def _flush(self, tasks: list[FileTask], found: dict[str, FileReport | None]) -> None:
        """Force this rank's files of the dataset to the disk."""
        for task in tasks:
            report = found[task.stem]
            if report is None or not report.count or task.directory != self.out:
                continue
            try:
                flush_file(task.directory / report.images)
                if report.labels_sha256 is not None:
                    flush_file(task.directory / str(report.packed().labels))
            except OSError as error:
                raise storage_error(task.directory / report.images, error) from error

    def _check(self, inputs: Sequence[Path], *, overwrite: bool) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise DataError(f"{self.out} is a file; the packed dataset is a directory: give another name")
        if self.out.is_symlink() and not self.out.exists():
            raise DataError(f"{self.out} is a link to {self.out.readlink()}, which is not there; mend it, or give another name")
        for path in inputs:
            if path.resolve().is_relative_to(self.out.resolve()):
                raise DataError(f"{path} lies in {self.out}, where files may be replaced; pack into another directory")
            if self.out.resolve().is_relative_to(path.resolve()):
                raise DataError(f"{self.out} lies in {path}, which it would become a part of; pack into another directory")
        present = sorted(entry.name for entry in self.out.iterdir()) if self.out.is_dir() else []
        interrupted = MARKER_NAME in present and FILE_NAME not in present
        if present and not interrupted and not overwrite:
            what = "a packed dataset" if FILE_NAME in present else f"files that are not of a packed dataset, such as {present[0]}"
            raise DataError(f"{self.out} has {what}; choose another directory or pass --overwrite")

    def _lock(self) -> None:
        """Let no other packing in until this one ends, however it ends. The directory itself is locked: no file is left behind."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise storage_error(self.out, error) from error
        self._locked.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another packing is at work in {self.out}; wait until it ends, or choose another directory") from None
        except OSError:  # a file system without locks
            return

    def _begin(self, digest: str) -> None:
        """Go on with the same plan, or clear away what another one left.

        In this order a kill at any moment leaves a directory that says of itself that its packing did not finish.
        """
        try:
            same = not (self.out / FILE_NAME).exists() and _same_plan(self.scratch / _PLAN_NAME, digest)
            if not same:
                if self.scratch.exists():
                    shutil.rmtree(self.scratch)
                self.scratch.mkdir()
                (self.out / FILE_NAME).unlink(missing_ok=True)
                for name in filter(_OWN_NAME.fullmatch, [entry.name for entry in self.out.iterdir()]):
                    (self.out / name).unlink()
                write_json(self.scratch / _PLAN_NAME, {"digest": digest})
            (self.scratch / STOP_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(self.out, error) from error

    def _together(self, work: Callable[[], T]) -> T:
        """A mistake that one rank finds becomes the error of all."""
        if self._comm is None:
            return work()
        from deepex.comm.together import together

        return together(self._comm, work)


def _same_plan(path: Path, digest: str) -> bool:
    try:
        return bool(read_json(path)["digest"] == digest)
    except (RunError, KeyError, TypeError):
        return False
