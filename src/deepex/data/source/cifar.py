"""CIFAR-10 and CIFAR-100 in their binary versions: records of a label (CIFAR-100: two) and 3 planes of 32×32 bytes.

>>> source = open_cifar(Path("cifar-10-batches-bin"))
>>> source.train.count, source.train.shape, source.classes[0]
(50000, (32, 32, 3), 'airplane')
"""

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.layout import listed
from deepex.errors import DataError

_IMAGE_BYTES: Final = 3 * 32 * 32
_ROWS: Final = 4096  # gathered at a time, 12 MB
_REMEDY: Final = "fetch the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it"


@dataclass(frozen=True, kw_only=True)
class _Version:
    """The files of one version, and how many classes each label byte of a record has; the last one is used."""

    train: tuple[str, ...]
    test: str
    names: str
    classes: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        return len(self.classes) + _IMAGE_BYTES


_VERSIONS: Final = {
    "CIFAR-10": _Version(
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        names="batches.meta.txt",
        classes=(10,),
    ),
    "CIFAR-100": _Version(train=("train.bin",), test="test.bin", names="fine_label_names.txt", classes=(20, 100)),
}


@final
class CifarImages(Images):
    """The records of some files, which are mapped when they are first read."""

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        self._paths, self._label_bytes = tuple(paths), len(_VERSIONS[name].classes)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._counts = [_count(path, _VERSIONS[name]) for path in paths]
        self._starts = np.cumsum([0, *self._counts])
        self.count, self.shape, self.dtype = int(self._starts[-1]), (32, 32, 3), np.dtype(np.uint8)
        self.labels = np.concatenate([self._labels(file, _VERSIONS[name].classes) for file in range(len(paths))])
        self.description = {"format": f"{name} (binary)", "files": [path.name for path in paths]}

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        for file, (begin, end) in enumerate(pairwise(np.searchsorted(numbers, self._starts).tolist())):
            for first in range(begin, end, _ROWS):
                last = min(first + _ROWS, end)
                records = self._records(file)[numbers[first:last] - self._starts[file], self._label_bytes :]
                out[first:last] = records.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return []

    @override
    def name(self, number: int) -> str:
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        return f"{self._paths[file]} record {number - self._starts[file]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def _records(self, file: int) -> NDArray[np.uint8]:
        if file not in self._maps:
            path, size = self._paths[file], self._label_bytes + _IMAGE_BYTES
            try:
                if path.stat().st_size != self._counts[file] * size:
                    raise DataError(f"{path} has changed: it now has {path.stat().st_size} bytes; start again")
                self._maps[file] = np.asarray(np.memmap(path, np.uint8, "r").reshape(-1, size))
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from error
        return self._maps[file]

    def _labels(self, file: int, classes: tuple[int, ...]) -> NDArray[np.int64]:
        values = self._records(file)[:, : len(classes)].astype(np.int64)
        wrong = np.argwhere(values >= classes)
        if len(wrong):
            record, which = wrong[0].tolist()
            raise DataError(
                f"{self._paths[file]} has the label {values[record, which]} in record {record}; labels here are 0 to "
                f"{classes[which] - 1}, so the file is damaged or of another kind: {_REMEDY}"
            )
        return values[:, -1]


def open_cifar(path: Path) -> Source:
    """Open the folder of either dataset; its test files are the validation part."""
    names = _listed_files(path)
    version_name = "CIFAR-100" if {"train.bin", "test.bin"} & names else "CIFAR-10"
    version = _VERSIONS[version_name]
    missing = [name for name in (*version.train, version.test) if name not in names]
    if missing:
        raise _incomplete(path, version_name, missing, names)
    train = CifarImages([path / name for name in version.train], version_name)
    validation = CifarImages([path / version.test], version_name)
    classes = _class_names(path / version.names, version.classes[-1]) if version.names in names else None
    return Source(train=train, validation=validation, classes=classes)


def _listed_files(path: Path) -> set[str]:
    try:
        if path.is_file() and (tarfile.is_tarfile(path) or path.name.endswith((".tar.gz", ".tgz", ".tar"))):
            raise DataError(f"{path} is an archive; unpack it first (tar xf {path.name}) and give the folder")
        return set(os.listdir(path))
    except NotADirectoryError:
        raise DataError(f"{path} is a file; give the folder with all files of CIFAR: {_REMEDY}") from None
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}; correct the name") from error


def _incomplete(path: Path, version: str, missing: list[str], names: set[str]) -> DataError:
    if "data_batch_1" in names or {"train", "test", "meta"} <= names:
        return DataError(
            f"{path} has the Python version of CIFAR; it is pickled, and unpickling runs whatever code a file holds, so it is not "
            f"read: {_REMEDY}"
        )
    archives = [name for name in sorted(names) if name.startswith("cifar") and name.endswith((".tar.gz", ".tgz", ".tar"))]
    if archives:
        return DataError(f"{path} has the archive {archives[0]}, not the files of CIFAR; unpack it first and give its folder")
    return DataError(f"{path} has no {listed(missing)}, which {version} consists of; it has {listed(sorted(names))}: {_REMEDY}")


def _count(path: Path, version: _Version) -> int:
    """The number of records in a file."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from error
    count, rest = divmod(size, version.record_bytes)
    if rest or not count:
        raise DataError(
            f"{path} has {size} bytes, which is not a multiple of a record of {version.record_bytes} bytes (it ends {rest} bytes "
            f"after record {count - 1}); {_REMEDY}"
        )
    return count


def _class_names(path: Path, expected: int) -> tuple[str, ...]:
    try:
        names = tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; restore it, or take it away") from error
    if len(names) != expected or len(set(names)) != expected:
        raise DataError(f"{path} has {len(set(names))} different names; there are {expected} classes: restore it, or take it away")
    return names
