"""Whether the parts of a source and the names of their classes fit together."""

from collections.abc import Sequence

from deepex.data.source.base import Source
from deepex.errors import DataError

_MOST_UNNAMED_CLASSES = 100_000


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
    if len(classes) <= greatest:
        raise DataError(
            f"{len(classes)} class names were given, but the labels go to {greatest}; give {greatest + 1} names or more"
        )
    return tuple(classes)


def check_agreement(source: Source) -> None:
    """Train and validation must be of one kind."""
    train, validation = source.train, source.validation
    if validation is None:
        return
    if train.shape != validation.shape:
        raise DataError(
            f"{train.name(0)} has (height, width, channels) {train.shape}, but the validation image {validation.name(0)} has "
            f"{validation.shape}; they must be equal: resize one of them"
        )
    if (train.dtype.kind == "f") != (validation.dtype.kind == "f"):
        raise DataError(
            f"{train.name(0)} is of {train.dtype}, but the validation image {validation.name(0)} is of {validation.dtype}; both "
            "must be integers or both real numbers: convert one of them"
        )
    if (train.labels is None) != (validation.labels is None):
        without = train if train.labels is None else validation
        raise DataError(f"{without.name(0)} is without labels, but the other part has some; give labels to both or none")
