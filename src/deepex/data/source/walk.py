"""Going through a folder and all below it, links included.

>>> folder, names = next(walk(Path("imagenet/train")))        # then imagenet/train/n01440764, …
"""

import os
from collections.abc import Iterator
from pathlib import Path


def walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder with the names of its files, both sorted and without hidden ones.

    A folder is met once: links may lead back. One that cannot be listed is passed over.
    """
    seen: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        key = (status.st_dev, status.st_ino)
        inner[:] = [] if key in seen else sorted(_shown(inner))
        if key not in seen:
            yield Path(folder), sorted(_shown(names))
        seen.add(key)


def _shown(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]
