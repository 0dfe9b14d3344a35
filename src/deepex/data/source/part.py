"""Folders and groups that are parts of a dataset, and not classes of one.

>>> part_folders(["test", "train", "val"], Path("imagenet"))
('train', 'val')
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deepex.data.source.layout import listed
from deepex.errors import DataError

TRAIN: Final = "train"
HELD_OUT: Final = ("validation", "val", "valid", "test")  # the first that is there; what else is there is left out


def part_folders(folders: Sequence[str], root: Path) -> tuple[str, str | None] | None:
    """The folders of the train and of the validation samples, in any case; None if `folders` are classes."""
    named = {name.lower(): name for name in sorted(folders)}  # of Train and train the last, which is spelt as here
    held = next((named[name] for name in HELD_OUT if name in named), None)
    if TRAIN in named and (held is not None or len(folders) == 1):
        return named[TRAIN], held
    if named and set(named) <= set(HELD_OUT):
        raise DataError(
            f"{root} has no folder {TRAIN} beside {listed(list(folders))}, which is for validation; name the train folder {TRAIN}, "
            "or give the folder itself to pack it"
        )
    return None


def check_same_classes(train: Sequence[str] | None, validation: Sequence[str] | None, root: Path) -> None:
    """Both parts must have folders of the same classes, or none."""
    pair = {"train": train, "validation": validation}
    if (train is None) != (validation is None):
        flat = next(part for part, classes in pair.items() if classes is None)
        raise DataError(
            f"{root}: the {flat} samples have no class folders, but the others have; give both or neither class folders"
        )
    if train and validation and len(train) > len(validation) == 1 and validation[0] not in train:
        raise DataError(
            f"{root}: the validation samples are all in one folder, {validation[0]}, which is no class of the others; sort them "
            "into folders of these classes, or give the train folder alone and name the others in a list with --validation LIST"
        )
    for here, there in (("train", "validation"), ("validation", "train")):
        alone = sorted(set(pair[here] or ()) - set(pair[there] or ()))
        if alone:
            raise DataError(
                f"{root}: class {listed(alone, 3)} has a folder for {here} but none for {there}; both need the same "
                "classes: add the folder, or take the class out"
            )
