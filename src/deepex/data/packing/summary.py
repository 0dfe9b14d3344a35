"""From the reports of the files that were written to the manifest of the dataset."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from deepex.data.manifest import Manifest, Part
from deepex.data.npy import map_npy
from deepex.data.packing.config import PackConfig
from deepex.data.packing.form import Form
from deepex.data.packing.moments import Moments
from deepex.data.packing.writer import FileReport
from deepex.data.source.base import Source
from deepex.data.source.layout import listed
from deepex.errors import DataError
from deepex.record.files import write_text

SKIPPED_NAME: Final = "skipped.txt"
_LISTED: Final = 20  # bad samples in the manifest; all of them are in skipped.txt


def summarise(
    source: Source,
    config: PackConfig,
    form: Form,
    *,
    parts: Mapping[str, list[FileReport]],
    unpacked: list[FileReport],
    classes: tuple[str, ...],
    command: str,
    out: Path,
) -> Manifest:
    """Make the manifest; what was left out is listed in a file of its own."""
    reports = [report for files in (*parts.values(), unpacked) for report in files]
    moments = Moments(source.train.shape[2])
    for report in parts["train"]:
        moments.join(Moments.from_json(report.moments))
    packed = {part: _part(part, files) for part, files in parts.items()}
    low, high = (0.0, 255.0) if form.quantise else config.scale or moments.own_scale(np.dtype(form.dtype))
    mean, deviation = moments.scaled(low, high)
    height, width, channels = source.train.shape
    return Manifest(
        name=config.name or "dataset",
        shape=(channels, height, width),
        dtype=form.dtype,
        layout="NHWC",
        classes=classes,
        order="given" if config.given_order else "shuffled",
        seed=config.seed,
        scale=(float(low), float(high)),
        mean=tuple(mean),
        deviation=tuple(deviation),
        parts=packed,
        source={
            "command": command,
            "license": config.license,
            **source.train.description,
            **_files(source),
            **source.extra,
            "available": {
                part: one.count for part, one in (("train", source.train), ("validation", source.validation)) if one is not None
            },
            "kept": {part: files.count for part, files in packed.items()},
            **_notes(reports, form),
            **_empty_classes(packed["train"], classes, out),
            **_skipped([one for report in reports for one in report.bad], out),
        },
    )


def _files(source: Source) -> dict[str, Any]:
    """The names of the files of both parts, where the sources list them."""
    both = [one.description.get("files") for one in (source.train, source.validation) if one is not None]
    lists = [files for files in both if isinstance(files, list)]
    return {"files": list(dict.fromkeys(name for files in lists for name in files))} if lists else {}


def _part(name: str, reports: list[FileReport]) -> Part:
    files = tuple(report.packed() for report in reports if report.count)
    if not files:
        first = next((f"{file}: {reason}" for report in reports for file, reason in report.bad), "its files are there, and empty")
        raise DataError(f"no sample of the part {name!r} could be read, so --skip-bad would leave nothing; the first is {first}")
    return Part(count=sum(file.count for file in files), files=files)


def _empty_classes(train: Part, classes: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Which classes have no train sample: labels begin at 1 or have gaps, or all samples of a class were left out."""
    counts = np.zeros(len(classes), np.int64)
    for file in train.files:
        if file.labels is not None:
            counts += np.bincount(map_npy(out / file.labels), minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    return {"empty_classes": f"{len(empty)} of {len(classes)} have no train sample: {listed(empty)}"} if empty else {}


def _notes(reports: list[FileReport], form: Form) -> dict[str, Any]:
    """What was changed on the way, and how often."""
    notes: Counter[str] = Counter()
    for report in reports:
        notes.update(report.notes)
    quantised = {"quantised": f"{form.quantise[0]:g} to {form.quantise[1]:g} became 0 to 255"} if form.quantise else {}
    return ({"changed": dict(notes)} if notes else {}) | quantised


def _skipped(skipped: list[tuple[str, str]], out: Path) -> dict[str, Any]:
    """Write the list of what was left out; the manifest has its length and beginning."""
    if not skipped:
        (out / SKIPPED_NAME).unlink(missing_ok=True)
        return {}
    lines = [f"{name}: {reason}".encode("utf-8", "backslashreplace").decode() for name, reason in skipped]
    write_text(out / SKIPPED_NAME, "\n".join(lines) + "\n")
    return {"skipped": {"count": len(skipped), "first": lines[:_LISTED], "file": SKIPPED_NAME}}
