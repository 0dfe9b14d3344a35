"""Where samples lie and how: each placement and format, from each directory."""

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar, final

from typing_extensions import override

from deepex.errors import ConfigError
from deepex.study.kinds.base import Kind, Subject, Variant, crowded
from deepex.study.storage.copies import settings


@final
@dataclass(frozen=True, kw_only=True)
class Storage(Kind):
    """`placements` × `formats` × `directories` on `ranks` ranks.

    The dataset is copied there first, and dropped from memory before each run, so that the first epoch reads the disk; the copies
    stay until they are deleted.
    """

    name: ClassVar[str] = "storage"
    directories: tuple[str, ...]
    ranks: int = 2
    placements: tuple[str, ...] = ("host", "stream")
    formats: tuple[str, ...] = ("packed", "hdf5")

    def __post_init__(self) -> None:
        if not self.directories:
            raise ConfigError("--directories is empty; it takes directories on the file systems to compare: /scratch/me,/dev/shm")

    @override
    def check_here(self) -> None:
        for directory in self.directories:
            if not Path(directory).is_dir():
                raise ConfigError(
                    f"--directories has {directory!a}, which is not a directory; make it first, on the file system that is to be "
                    "measured, or leave it out"
                )
            if not os.access(directory, os.W_OK | os.X_OK):
                raise ConfigError(f"--directories has {directory!a}, where you may not write; choose one for the dataset's copies")

    @override
    def variants(self, subject: Subject) -> list[Variant]:
        data, threads = subject.config.data, {"threads": subject.threads(self.ranks)}
        return [
            Variant(
                varied={"placement": placement, "format": name, "directory": directory},
                ranks=self.ranks,
                settings=threads | {"placement": placement, **settings(data, directory, name)},
                before=("deepex.study.storage", data, directory, name),
            )
            for placement, name, directory in product(self.placements, self.formats, self.directories)
        ]

    @override
    def notes(self, subject: Subject) -> list[str]:
        stay = f"copies of {subject.config.data} go to {', '.join(self.directories)}, and stay there"
        return [stay, *crowded(subject, self.ranks, subject.threads(self.ranks))]
