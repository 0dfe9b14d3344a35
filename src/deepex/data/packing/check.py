"""Whether the parts of a source and the names of their classes fit together."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from deepex.data.packing.command import option_words
from deepex.data.source import SourceConfig
from deepex.data.source.base import Images, Source
from deepex.data.source.layout import listed
from deepex.errors import DataError

_MOST_UNNAMED_CLASSES = 100_000
_PICTURES: Final = "PNG and JPEG files"
_TRAJECTORIES: Final = "trajectories, with --topology"
_ONLY_FOR: Final = {
    "images": "HDF5 and .npz files",
    "labels": "HDF5, .npz, .npy and IDX files",
    "validation_labels": "HDF5 and .npz files with validation images",
    "layout": "HDF5, .npz, .npy and IDX files",
    "convert": _PICTURES,
    "max_pixels": _PICTURES,
    "matrix": "matrices as text",
    "select": _TRAJECTORIES,
    "cutoff": _TRAJECTORIES,
    "stride": _TRAJECTORIES,
    "periodic": _TRAJECTORIES,
}


def check_options(reading: SourceConfig, held_labels: str | None, sources: Sequence[tuple[Path, Source]]) -> None:
    """What was given must have an effect: labels on the source that they are for, the rest on any."""
    default = SourceConfig()
    given = [(key, key, getattr(reading, key), sources[:1] if key == "labels" else sources) for key in _ONLY_FOR]
    given.append(("validation_labels", "labels", held_labels, sources[1:]))
    for name, key, value, found in given:
        if value != getattr(default, key) and not any(key in source.options for _, source in found):
            raise DataError(
                f"{' '.join(option_words(name, value))} was given, but has no effect on {found[0][0]}: it is for "
                f"{_ONLY_FOR[key]} only; leave it out"
            )


def with_validation(source: Source, other: Source) -> Source:
    """`source` with the samples of `other` for validation, in place of its own.

    Their classes are found by their names where both sources have names.
    """
    if source.classes is None or other.classes is None:
        return replace(source, validation=other.train)
    unknown = [name for name in other.classes if name not in source.classes]
    if unknown:
        raise DataError(
            f"the validation samples ({other.train.name(0)}, …) have the class {listed(unknown)}, which the train samples do not "
            f"have; they have {listed(list(source.classes))}: correct the name, or take the class out"
        )
    return replace(source, validation=_renumbered(other.train, other.classes, source.classes))


def numbered_by(source: Source, names: Sequence[str] | None) -> Source:
    """`source` with its classes numbered as `names` has them; where none of its classes is among `names`, they are new names."""
    if names is not None:
        _check_names(names)
    if names is None or source.classes is None:
        return source
    unknown = [name for name in source.classes if name not in names]
    if unknown == list(source.classes) and len(names) == len(unknown):
        return source
    if unknown:
        raise DataError(
            f"--classes gives {len(names)} names, {listed(list(names))}, without {listed(unknown)} of the source's classes "
            f"{listed(list(source.classes))}; give all of these in the order wanted, or a new name for each of them"
        )
    parts = (source.train, source.validation)
    train, validation = (None if one is None else _renumbered(one, source.classes, names) for one in parts)
    assert train is not None
    return replace(source, train=train, validation=validation, classes=tuple(names))


def _check_names(names: Sequence[str]) -> None:
    if not names or not all(name.strip() for name in names):
        shown = listed([repr(name) for name in names])
        raise DataError(f"the names of the classes are {shown}, where one is missing; give each class one name")
    if len(set(names)) < len(names):
        raise DataError(f"the names of the classes are {listed(list(names))}, where a name is twice; give each class one name")


def _renumbered(images: Images, classes: Sequence[str], order: Sequence[str]) -> Images:
    """`images`, whose labels are places in `classes`, with the places of these names in `order`."""
    if images.labels is None or tuple(classes) == tuple(order):
        return images
    numbers = {name: number for number, name in enumerate(order)}
    made = copy.copy(images)
    made.labels = np.array([numbers[name] for name in classes], np.int64)[images.labels]
    return made


def class_names(source: Source, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Give a name to every class, numbers where there are none; labels must fit them."""
    present = [s.labels for s in (source.train, source.validation) if s is not None and s.labels is not None]
    if not present:
        if classes:
            raise DataError(f"{len(classes)} class names were given, but {source.train.name(0)} has no labels; give labels too")
        return ()
    greatest = max(int(labels.max()) for labels in present)
    if classes is None:
        if greatest >= _MOST_UNNAMED_CLASSES:
            raise DataError(
                f"a sample like {source.train.name(0)} has the label {greatest}; labels count from 0, without gaps: renumber them"
            )
        return tuple(map(str, range(greatest + 1)))
    _check_names(classes)
    if len(classes) <= greatest:
        raise DataError(
            f"{len(classes)} class names were given, but the labels go to {greatest}; give {greatest + 1} names or more"
        )
    return tuple(classes)


def _to_one_shape(train: Images, validation: Images) -> str:
    """What brings images of two shapes to one."""
    if train.shape[:2] != validation.shape[:2]:
        return "resize one of them"
    channels = {train.shape[2], validation.shape[2]}
    return "--channels 3 replicates monochrome images" if channels == {1, 3} else "convert one of them"


def check_agreement(source: Source) -> None:
    """Train and validation must be of one kind."""
    train, validation = source.train, source.validation
    if validation is None:
        return
    if train.shape != validation.shape:
        raise DataError(
            f"{train.name(0)} has (height, width, channels) {train.shape}, but the validation image {validation.name(0)} has "
            f"{validation.shape}; they must be equal: {_to_one_shape(train, validation)}"
        )
    if (train.dtype.kind == "f") != (validation.dtype.kind == "f"):
        raise DataError(
            f"{train.name(0)} is of {train.dtype}, but the validation image {validation.name(0)} is of {validation.dtype}; both "
            "must be integers or both real numbers: convert one of them"
        )
    bits = [one.description.get("bits") for one in (train, validation)]
    if None not in bits and bits[0] != bits[1]:
        raise DataError(
            f"most train images have {bits[0]} bits per value, but most validation images ({validation.name(0)}, …) {bits[1]}; "
            "they must have equally many: convert them"
        )
    if (train.labels is None) != (validation.labels is None):
        without = train if train.labels is None else validation
        raise DataError(f"{without.name(0)} is without labels, but the other part has some; give labels to both or none")
