"""Writing one file of a packed dataset: samples read, converted and checked block by block.

    form = Form(dtype="uint8", skip_bad=True)
    report = write_file(images, FileTask(key="train", stem="train-00003", directory=out, order=numbers), form, advance)

Memory holds one file's images and one block, however large the source is. The report has all that the manifest needs; it is saved
beside an unfinished packing, so that a packing that was interrupted goes on where it stopped.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepex.data.manifest import PackedFile
from deepex.data.npy import COMPRESSED, write_npy
from deepex.data.packing.form import Form
from deepex.data.packing.moments import Moments
from deepex.data.source.base import Bad, Images
from deepex.errors import DataError

_BLOCK_BYTES: Final = 1 << 20  # of values converted at a time: the copy for the moments stays in the cache


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTask:
    """One file to write: the samples `order` of the images called `key`. `in_place` keeps the rows of bad samples, as zeros."""

    key: str
    stem: str
    directory: Path
    order: NDArray[np.int64]
    in_place: bool = False


@dataclass(kw_only=True)
class FileReport:
    """What came of a task; plain values, so that it goes to JSON and back."""

    stem: str
    count: int = 0
    images: str = ""
    images_sha256: str = ""
    labels_sha256: str | None = None
    moments: list[Any] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def packed(self) -> PackedFile:
        """The entry of the manifest."""
        labels = None if self.labels_sha256 is None else f"{self.stem}-labels.npy"
        return PackedFile(
            images=self.images,
            labels=labels,
            count=self.count,
            images_sha256=self.images_sha256,
            labels_sha256=self.labels_sha256,
        )


def write_file(images: Images, task: FileTask, form: Form, advance: Callable[[int], None]) -> FileReport:
    """Write the file of a task and that of its labels; `advance` is told the samples of each block."""
    report = FileReport(stem=task.stem)
    stored = np.zeros((len(task.order), *images.shape), form.dtype)
    moments, kept = Moments(images.shape[2]), np.ones(len(task.order), bool)
    for places, numbers in _blocks(images, task.order):
        raw = np.empty((len(numbers), *images.shape), images.dtype)
        bad = images.read(numbers, raw)
        for one in bad:
            raw[one.place] = 0  # it is undefined; its misfits are none of ours
        block, misfits = form.convert(raw)
        bad += [Bad(place, images.name(int(numbers[place])), reason) for place, reason in misfits]
        kept[places[[one.place for one in bad]]] = False
        _note(report, bad, skip=form.skip_bad)
        good = kept[places]
        moments.add(block if good.all() else block[good])
        stored[places[good]] = block if good.all() else block[good]
        advance(len(numbers))
    report.moments = moments.to_json()
    report.notes = dict(getattr(images, "notes", Counter()))
    getattr(images, "notes", Counter()).clear()
    _save(images, task, report, stored, kept, compress=form.compress)
    return report


def _note(report: FileReport, bad: list[Bad], *, skip: bool) -> None:
    """List what is bad; without a reason it was listed before."""
    for one in bad:
        if one.reason and not skip:
            raise DataError(f"{one.name}: {one.reason}; or leave such samples out with --skip-bad")
        if one.reason:
            report.bad.append((one.name, one.reason))


def _save(
    images: Images, task: FileTask, report: FileReport, stored: NDArray[Any], kept: NDArray[np.bool_], *, compress: bool
) -> None:
    order = task.order
    if task.in_place:
        report.missing = np.flatnonzero(~kept).tolist()
    elif not kept.all():
        stored, order = stored[kept], order[kept]
    report.count = len(order)
    if not report.count:
        return
    report.images = f"{task.stem}.npy" + (COMPRESSED if compress else "")
    report.images_sha256 = write_npy(task.directory / report.images, stored, flush=False)
    if images.labels is not None and not task.in_place:
        report.labels_sha256 = write_npy(task.directory / f"{task.stem}-labels.npy", images.labels[order], flush=False)


def _blocks(images: Images, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Places in the file and numbers in the source, in ascending numbers; what is cheapest read together stays together."""
    places = np.argsort(order, kind="stable")
    numbers = order[places]
    per_block = max(1, _BLOCK_BYTES // (math.prod(images.shape) * images.dtype.itemsize))
    if images.block == 1:
        cuts = np.arange(per_block, len(order), per_block)
    else:
        units = numbers // (images.block * max(1, per_block // images.block))
        cuts = np.flatnonzero(np.diff(units)) + 1
    yield from zip(np.split(places, cuts), np.split(numbers, cuts), strict=True)
