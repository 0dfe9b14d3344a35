"""Packing: from files as they are found to a packed dataset, shuffled once, in files of a size that disks like.

The order is drawn at pack time from the seed, so that any contiguous range of samples is a fair shard of the whole.

>>> manifest = pack("fashion-mnist", "packed/fashion", limit=6000, seed=1)
>>> manifest.parts["train"].count
6000

Nothing is a dataset before the manifest is written, which comes last; an interrupted packing is simply started again.
"""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepex.data.manifest import FILE_NAME, MARKER_NAME, Manifest, save
from deepex.data.moments import Moments
from deepex.data.source import Layout, Source, read_source
from deepex.data.split import Chosen, choose
from deepex.data.writer import PartWriter, Progress, stored_dtype
from deepex.errors import DataError
from deepex.record.files import storage_error, write_text

_MOST_UNNAMED_CLASSES = 100_000
_OWN_NAME = re.compile(r"\.?(train|validation)-\d{5,}(-labels)?\.npy(\.part)?|\.manifest\.json\.part")


def pack(
    source: Path | str,
    out: Path | str,
    *,
    labels: Path | str | None = None,
    validation: float | Path | str = 0.1,
    validation_labels: Path | str | None = None,
    seed: int = 1,
    shuffle: bool = True,
    limit: int | None = None,
    validation_limit: int | None = None,
    balance: bool = False,
    name: str | None = None,
    classes: Sequence[str] | None = None,
    scale: tuple[float, float] | None = None,
    layout: Layout | None = None,
    license: str | None = None,  # noqa: A002 - the name of the key in the manifest
    overwrite: bool = False,
    file_bytes: int = 64 << 20,
    progress: Progress | None = None,
) -> Manifest:
    """Pack `source` into the directory `out` and return the manifest.

    `validation` is a file of validation images, or the share of the train samples to set aside when the source has no
    validation part of its own (0: none). A limit takes the first samples after the shuffle, with `balance` equally
    many of each class. `progress` is told the samples written and those to write.
    """
    source, out = Path(source), Path(out)
    share, held_out = (0.0, Path(validation)) if isinstance(validation, Path | str) else (validation, None)
    files = _Files(source, _path(labels), held_out, _path(validation_labels))
    _check_options(share=share, seed=seed, limit=limit, validation_limit=validation_limit, file_bytes=file_bytes, scale=scale)
    found = _read(files, layout)
    _check_agreement(found)
    class_names = _class_names(found, classes)
    chosen = choose(found, share=share, seed=seed, shuffle=shuffle, balance=balance, limit=limit, validation_limit=validation_limit)
    dtype = stored_dtype(found)
    _prepare(out, files, overwrite=overwrite)

    total = sum(len(picked.order) for picked in chosen.values())
    writer = PartWriter(out=out, dtype=dtype, file_bytes=file_bytes, total=total, progress=progress)
    _, height, width, channels = found.train.images.shape
    moments = Moments(channels)
    parts = {part: writer.write(part, picked, moments if part == "train" else None) for part, picked in chosen.items()}
    low, high = scale or _scale(dtype, moments)
    mean, deviation = moments.scaled(low, high)

    options = {
        "labels": files.labels,
        "validation": held_out or (share if found.validation is None else None),
        "validation_labels": files.validation_labels,
        "seed": seed,
        "given_order": not shuffle,
        "limit": limit,
        "validation_limit": validation_limit,
        "balance": balance,
        "scale": scale,
        "layout": layout,
    }
    manifest = Manifest(
        name=name or source.absolute().name.split(".")[0] or "dataset",
        shape=(channels, height, width),
        dtype="uint8" if dtype == np.uint8 else "float32",
        layout="NHWC",
        classes=class_names,
        order="shuffled" if shuffle else "given",
        seed=seed,
        scale=(float(low), float(high)),
        mean=tuple(mean),
        deviation=tuple(deviation),
        parts=parts,
        source={
            "command": _command(source, options),
            "license": license,
            **_describe(found, chosen),
        },
    )
    save(out, manifest)
    (out / MARKER_NAME).unlink(missing_ok=True)
    return manifest


class _Files(NamedTuple):
    """What the caller named."""

    source: Path
    labels: Path | None
    validation: Path | None
    validation_labels: Path | None


def _read(files: _Files, layout: Layout | None) -> Source:
    found = read_source(files.source, labels=files.labels, layout=layout)
    if files.validation is not None:
        held_out = read_source(files.validation, labels=files.validation_labels, layout=layout)
        return Source(train=found.train, validation=held_out.train)
    if files.validation_labels is not None:
        raise DataError(f"validation labels {files.validation_labels} were given without validation images; name their file too")
    return found


def _scale(dtype: np.dtype[Any], moments: Moments) -> tuple[float, float]:
    if dtype == np.uint8:
        return (0.0, 1.0) if moments.high <= 1 else (0.0, 255.0)
    low, high = moments.low, moments.high
    return (low, high) if low < high else (low, low + max(1.0, abs(low)))  # at 1e17, low + 1 is low


def _class_names(source: Source, classes: Sequence[str] | None) -> tuple[str, ...]:
    present = [s.labels for s in (source.train, source.validation) if s is not None and s.labels is not None]
    if not present:
        if classes:
            raise DataError(f"{len(classes)} class names were given, but {source.train.path} has no labels; give labels too")
        return ()
    greatest = max(int(labels.max()) for labels in present)
    if classes is None:
        if greatest >= _MOST_UNNAMED_CLASSES:
            raise DataError(
                f"{source.train.path} has the label {greatest}; labels are class numbers from 0, no gaps: renumber them"
            )
        return tuple(map(str, range(greatest + 1)))
    if len(classes) <= greatest:
        raise DataError(
            f"{len(classes)} class names were given, but the labels go to {greatest}; give {greatest + 1} names or more"
        )
    return tuple(classes)


def _check_agreement(source: Source) -> None:
    """Train and validation must be of one kind."""
    train, validation = source.train, source.validation
    if validation is None:
        return
    if train.images.shape[1:] != validation.images.shape[1:]:
        raise DataError(
            f"{train.path} has train images of (height, width, channels) {train.images.shape[1:]}, {validation.path} "
            f"has validation images of {validation.images.shape[1:]}; they must be equal: resize one of them"
        )
    if (train.images.dtype.kind == "f") != (validation.images.dtype.kind == "f"):
        raise DataError(
            f"{train.path} has train images of {train.images.dtype}, {validation.path} has validation images of "
            f"{validation.images.dtype}; both must be integers or both real numbers: convert one of them"
        )
    if (train.labels is None) != (validation.labels is None):
        without = train if train.labels is None else validation
        raise DataError(f"{without.path} has images without labels, but the other part has labels; give labels to both or none")


def _check_options(
    *,
    share: float,
    seed: int,
    limit: int | None,
    validation_limit: int | None,
    file_bytes: int,
    scale: tuple[float, float] | None,
) -> None:
    if not 0 <= share < 1:
        raise DataError(f"validation is {share}; it must be a share of the train samples, 0 or more and below 1, or a file")
    if seed < 0:
        raise DataError(f"seed is {seed}; it must be 0 or more")
    for key, value in (("limit", limit), ("validation limit", validation_limit), ("file size", file_bytes)):
        if value is not None and value < 1:
            raise DataError(f"{key} is {value}; it must be 1 or more")
    if scale is not None and not (all(map(math.isfinite, scale)) and scale[0] < scale[1]):
        raise DataError(f"scale is {scale[0]}, {scale[1]}; it must be two numbers, low below high, that map to 0 and 1")


def _prepare(out: Path, files: _Files, *, overwrite: bool) -> None:
    """Make `out` a directory in which a packing has begun, without what an earlier one left there."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; the packed dataset is a directory: give another name")
    for path in files:
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise DataError(f"{path} lies in {out}, where files may be replaced; pack into another directory")
    present = sorted(entry.name for entry in out.iterdir() if entry.name != f".{MARKER_NAME}.part") if out.is_dir() else []
    interrupted = MARKER_NAME in present and FILE_NAME not in present
    if present and not interrupted and not overwrite:
        what = "a packed dataset" if FILE_NAME in present else f"files that are not of a packed dataset, such as {present[0]}"
        raise DataError(f"{out} has {what}; choose another directory or pass --overwrite")
    try:
        out.mkdir(parents=True, exist_ok=True)
        # In this order a kill at any moment leaves a directory that says of itself that its packing did not finish.
        write_text(out / MARKER_NAME, "A packing into this directory has begun and not finished.\n")
        (out / FILE_NAME).unlink(missing_ok=True)
        for name in filter(_OWN_NAME.fullmatch, present):
            (out / name).unlink()
    except OSError as error:
        raise storage_error(out, error) from error


def _describe(source: Source, chosen: dict[str, Chosen]) -> dict[str, Any]:
    """Say what the dataset was made from. Names of files only: a path would tell of the machine and the user."""
    parts = {"train": source.train, "validation": source.validation}
    present = {part: samples for part, samples in parts.items() if samples is not None}
    return {
        "files": list(dict.fromkeys(name for samples in present.values() for name in samples.files)),
        "layout": source.train.layout,
        "available": {part: len(samples.images) for part, samples in present.items()},
        "kept": {part: len(picked.order) for part, picked in chosen.items()},
    }


def _command(source: Path, options: dict[str, Any]) -> str:
    """Write the command that makes the same samples in the same order, but for the directories."""
    words = ["deepex", "data", "pack", source.absolute().name, "OUT"]
    for key, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{key.replace('_', '-')}")
        if isinstance(value, tuple):
            words.extend(map(str, value))
        elif value is not True:
            words.append(value.name if isinstance(value, Path) else str(value))
    return shlex.join(words)


def _path(value: Path | str | None) -> Path | None:
    return None if value is None else Path(value)
