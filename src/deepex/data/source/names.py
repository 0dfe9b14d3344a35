"""Which arrays of a file are the images and the labels: those under names that people use, or those that were given.

>>> names = usual({"x_train", "y_train", "x_test", "y_test"}.__contains__)
>>> names
Names(images='x_train', labels='y_train', held_images='x_test', held_labels='y_test')
>>> with_labels(names, Path("a.npz"), "kinds", "test_kinds").held_labels
'test_kinds'
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from deepex.data.source.part import HELD_OUT, TRAIN
from deepex.errors import DataError

_PAIRS: Final = (
    ("x_{}", "y_{}"),
    ("{}/images", "{}/labels"),
    ("{}/data", "{}/labels"),
    ("{}/x", "{}/y"),
    ("{}_images", "{}_labels"),
)
_SINGLE: Final = (("images", "labels"), ("data", "labels"), ("data", "label"), ("x", "y"), ("X", "y"))
LABELS: Final = ("labels", "label", "y")


class ArrayNames(NamedTuple):
    """Paths of arrays: train and validation."""

    images: str
    labels: str | None = None
    held_images: str | None = None
    held_labels: str | None = None


def usual(has: Callable[[str], bool]) -> ArrayNames | None:
    """The first names in use of which `has` tells that their images are there."""

    def there(name: str) -> str | None:
        return name if has(name) else None

    for images, labels in _PAIRS:
        if has(images.format(TRAIN)):
            train = (images.format(TRAIN), there(labels.format(TRAIN)))
            held = next((part for part in HELD_OUT if has(images.format(part))), None)
            return ArrayNames(*train) if held is None else ArrayNames(*train, images.format(held), there(labels.format(held)))
    present = [ArrayNames(images, there(labels)) for images, labels in _SINGLE if has(images)]
    return max(present, key=lambda names: names.labels is not None, default=None)


def with_labels(names: ArrayNames, path: Path, labels: str | None, held_labels: str | None) -> ArrayNames:
    """Take the labels that were given for those under the usual names; both parts must have theirs from one hand."""
    if held_labels is not None and names.held_images is None:
        raise DataError(
            f"validation labels {held_labels} were given without validation images, which {path} has not; name their file too"
        )
    if labels is not None and names.held_images is not None and held_labels is None:
        raise DataError(
            f"labels {labels} were given for the train samples, but {path} has validation images too, {names.held_images}; name "
            "their labels with --validation-labels (data_options.validation_labels)"
        )
    return names._replace(labels=labels or names.labels, held_labels=held_labels or names.held_labels)
