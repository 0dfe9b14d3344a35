"""Finding image files: folders with one folder per class, flat folders, and list files.

>>> train, validation = find_images(Path("imagenet"))         # imagenet/train/n01440764/…, imagenet/val/n01440764/…
>>> len(train.names), train.names[0], train.classes[:1]
(1281167, 'train/n01440764/n01440764_10026.JPEG', ('n01440764',))
>>> listing = read_list(Path("images.txt"))                   # lines `path label`, `path,label` (quoted or not) or `path`

Files are found by their suffix (.png .jpg .jpeg .jpe in any case) and opened by nobody here; a file that is no image is told when
it is read. Classes and the files of a folder are in the order of the bytes of their names. A folder that is reached twice through
links is listed once.
"""

import csv
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.part import check_same_classes, part_folders
from deepex.errors import DataError

SUFFIXES = (b".png", b".jpg", b".jpeg", b".jpe")
TEXT_SUFFIXES = (".txt", ".dat", ".csv", ".asc", ".lst")  # of a list; or else it has matrices
_LISTED = re.compile(r"\.(png|jpe?g|jpe)\b", re.IGNORECASE)
_BEGINNING = 1 << 20  # characters of a text that tell whether it is a list
_SUFFIX_AND_LABEL = re.compile(r"(?P<path>.*\.(?:png|jpe?g|jpe))(?P<gap>\s*,\s*|\s+)(?P<label>.+)", re.IGNORECASE)
_QUOTED = re.compile(r'^"|,\s*"')
_HEADERS = {"file", "filename", "file_name", "filepath", "file_path", "path", "image", "image_name", "image_path", "img", "name"}
_MOST_CLASSES = 100_000  # of those that have numbers only
_HIDDEN, _TWICE = "hidden", "folders reached twice"


class FileNames:
    """File names as one block of bytes and where each ends: a million Path objects would take 30 times the memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])

    def append(self, name: bytes) -> None:
        """Add a name."""
        self._bytes += name
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        """A name as the operating system takes it: bytes that are not UTF-8 become surrogates."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return os.fsdecode(bytes(self._bytes[self._ends[number] : self._ends[number + 1]]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing:
    """Files under `root`, their class numbers and the names of the classes where there are any, and what was passed over."""

    root: Path
    names: FileNames
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None
    ignored: Counter[str] = field(default_factory=Counter)
    layout: str = "a flat folder"


def printable(name: str | bytes) -> str:
    r"""A file name for messages and manifests: bytes that are not UTF-8 are written as \xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def find_images(root: Path) -> tuple[Listing, Listing | None]:
    """List the images under `root`, and those for validation if it has folders train/ and validation/, val/, valid/ or test/."""
    walk = _Walk(root)
    files, folders = walk.scan(b"")
    parts = None if files else part_folders([os.fsdecode(name) for name in folders], root)
    if parts is None:
        return _find_part(root, b""), None
    train, validation = (None if part is None else _find_part(root, os.fsencode(part)) for part in parts)
    assert train is not None
    train.ignored.update(walk.ignored + Counter(f"folder {printable(name)}" for name in folders if os.fsdecode(name) not in parts))
    if validation is not None:
        check_same_classes(train.classes, validation.classes, root)
    return train, validation


def _find_part(root: Path, prefix: bytes) -> Listing:
    walk = _Walk(root)
    files, folders = walk.scan(prefix)
    where = printable(os.path.join(os.fsencode(root), prefix))
    if files and folders:
        raise DataError(
            f"{where} has images ({printable(files[0])}, …) beside folders ({printable(folders[0])}, …); it must have images alone "
            "or one folder per class: move them, or name the images in a list file"
        )
    if not files and not folders:
        raise DataError(f"{where} has no images (.png, .jpg, .jpeg, .jpe) and no folders of classes; give another folder")
    if files:
        for name in files:
            walk.names.append(_join(prefix, name))
        return Listing(root=root, names=walk.names, ignored=walk.ignored)
    counts = walk.add_classes(prefix, folders)
    return Listing(
        root=root,
        names=walk.names,
        labels=np.repeat(np.arange(len(folders), dtype=np.int64), counts),
        classes=tuple(map(printable, folders)),
        ignored=walk.ignored,
        layout="one folder per class",
    )


class _Walk:
    """Goes through folders below `root`, each one once, and gathers names and what it passed over."""

    def __init__(self, root: Path) -> None:
        self.names = FileNames()
        self.ignored: Counter[str] = Counter()
        self._root = os.fsencode(root)
        self._seen: dict[tuple[int, int], bytes] = {}  # by device and inode: links may lead back

    def scan(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """The names of images and of folders in one folder, sorted. A folder that is called x.png counts as a (bad) image."""
        files, folders = [], []
        path = _join(self._root, prefix)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith(b"."):
                        self.ignored[_HIDDEN] += 1
                    elif name.lower().endswith(SUFFIXES):
                        files.append(name)
                    elif entry.is_dir():
                        folders.append(name)
                    else:
                        self.ignored[printable(os.path.splitext(name)[1].lower()) or "no suffix"] += 1
            self._enter(path)
        except OSError as error:
            raise DataError(f"folder {printable(path)} cannot be listed: {error.strerror}; check name and permissions") from None
        return sorted(files), sorted(folders)

    def add_classes(self, prefix: bytes, folders: list[bytes]) -> list[int]:
        """Add the files of each class; give their numbers."""
        for name in folders:  # all before any is walked: a link inside a class must not take the files of another
            path = _join(self._root, _join(prefix, name))
            same = self._enter(path)
            if same is not None:
                raise DataError(f"class folders {printable(same)} and {printable(path)} are one folder (a link); take one away")
        counts = [self._add(_join(prefix, name)) for name in folders]
        if 0 in counts:
            empty = printable(_join(self._root, _join(prefix, folders[counts.index(0)])))
            raise DataError(f"class folder {empty} has no images (.png, .jpg, .jpeg, .jpe); fill it or take it away")
        return counts

    def _add(self, prefix: bytes) -> int:
        before = len(self.names)
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            files, folders = self.scan(folder)
            for name in files:
                self.names.append(_join(folder, name))
            for name in reversed(folders):
                inner = _join(folder, name)
                if self._enter(_join(self._root, inner)) is None:
                    waiting.append(inner)
                else:
                    self.ignored[_TWICE] += 1
        return len(self.names) - before

    def _enter(self, path: bytes) -> bytes | None:
        """Remember a folder; the path under which it was met before, if it was."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"folder {printable(path)} cannot be entered: {error.strerror}; check its permissions") from None
        key = (status.st_dev, status.st_ino)
        known = self._seen.setdefault(key, path)
        return None if known is path else known


def _join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def is_list(path: Path) -> bool:
    """Whether a text names images on its first two lines that are no comment: the first may have the names of columns."""
    if not path.name.lower().endswith(TEXT_SUFFIXES):
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_BEGINNING).split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return any(map(_LISTED.search, [line for line in lines if line.strip() and not line.lstrip().startswith("#")][:2]))


def listed_files(path: Path) -> Iterator[Path]:
    """The files that a list names, as its lines are read; whether they are there is not looked at."""
    return (path.parent / name for _, name, _ in _entries(path, path.parent))


def read_list(path: Path, *, root: Path | None = None) -> Listing:
    """Read a list file, one image a line: `path label`, `path,label` or `path`; `#` begins a line of comment.

    Of a CSV file, fields may be quoted, and the first line may have the names of the columns, such as `filename,label`.

    Paths are relative to `root`, or else to the folder of the list. Labels are class numbers from 0, or names, which are numbered
    in their order.
    """
    root = path.parent if root is None else root
    names = FileNames()
    labels: list[str] = []
    lines = array("q")
    seen: set[bytes] = set()
    for number, name, label in _entries(path, root):
        key = os.path.normpath(os.fsencode(name))
        if key in seen:
            raise _line_error(
                path, number, f"{printable(name)} is named a second time; each image may occur once: take one line out"
            )
        seen.add(key)
        if b"\0" in key or not os.path.exists(os.path.join(os.fsencode(root), key)):
            raise _line_error(path, number, f"there is no file {printable(name)} in {root}; correct the line or the folder")
        if labels and (label == "") != (labels[0] == ""):
            raise _line_error(
                path, number, f"{printable(name)} has {'no' if label == '' else 'a'} label, unlike line {lines[0]}; be uniform"
            )
        names.append(key)
        labels.append(label)
        lines.append(number)
    if not labels:
        raise DataError(f"list {path} names no images; give one line `path label` for each")
    layout = f"the list {printable(path.name)}"
    if not labels[0]:
        return Listing(root=root, names=names, layout=layout)
    values, found = _labels(path, labels, lines)
    return Listing(root=root, names=names, labels=values, classes=found, layout=layout)


def _entries(path: Path, root: Path) -> Iterator[tuple[int, str, str]]:
    """Line, path and label ("" if there is none) of every image that a list names."""
    for place, (number, line) in enumerate(_lines(path)):
        if place == 0 and _is_header(line, root):
            continue
        try:
            yield number, *_parse_line(line)
        except _ColumnsError as error:
            raise _line_error(
                path,
                number,
                f"it has {error} columns, where a path and a label are expected; take the others out, or put quotes around a "
                "label that has commas",
            ) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                stripped = line.strip()
                if stripped and not stripped.startswith("#"):
                    yield number, stripped
    except OSError as error:
        raise DataError(f"list {path} cannot be read: {error.strerror}; check name and permissions") from None


def _is_header(line: str, root: Path) -> bool:
    """Whether a line names columns, and no file."""
    first = re.split(r"[,\s]", line, maxsplit=1)[0].strip('"')
    return first.lower() in _HEADERS and not (root / first).exists()


class _ColumnsError(Exception):
    """A line has so many columns, and not two."""


def _parse_line(line: str) -> tuple[str, str]:
    """Path and label ("" if there is none): the path ends with its suffix, so that both may have spaces."""
    fields = _quoted_fields(line) if _QUOTED.search(line) else []
    if 0 < len(fields) < 3:
        return fields[0].strip(), "".join(fields[1:]).strip()
    if fields and os.fsencode(fields[0].strip()).lower().endswith(SUFFIXES):
        raise _ColumnsError(len(fields))
    if os.fsencode(line).lower().endswith(SUFFIXES):
        return line, ""
    match = _SUFFIX_AND_LABEL.fullmatch(line)
    if match:
        separator = next((mark for mark in ",\t" if mark in match["gap"]), None)
        if separator is not None and separator in match["label"]:
            raise _ColumnsError(2 + match["label"].count(separator))
        return match["path"], match["label"]
    path, comma, label = line.rpartition(",")
    if comma:
        return path.strip(), label.strip()
    path, _, label = line.rpartition(" ")
    return (path.strip(), label) if path else (line, "")


def _quoted_fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line], skipinitialspace=True, strict=True))
    except csv.Error:  # the quotes are part of a name
        return []


def _labels(path: Path, labels: list[str], lines: "array[int]") -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    """Class numbers, and the classes' names if the labels are names."""
    if _is_number(labels[0]):
        for number, label in zip(lines, labels, strict=True):
            if not _is_number(label):
                raise _line_error(
                    path, number, f"label {printable(label)} is no integer, but that of line {lines[0]} is; use one kind"
                )
            if not 0 <= int(label) < _MOST_CLASSES:
                raise _line_error(path, number, f"label {label} is out of range; it must be 0 to {_MOST_CLASSES - 1}: correct it")
        return np.array([int(label) for label in labels], np.int64), None
    known = sorted(set(map(printable, labels)))
    table = {name: number for number, name in enumerate(known)}
    for number, label in zip(lines, labels, strict=True):
        if _is_number(label):
            raise _line_error(path, number, f"label {label} is an integer, but that of line {lines[0]} is a name; use one kind")
    return np.array([table[printable(label)] for label in labels], np.int64), tuple(known)


def _is_number(label: str) -> bool:
    return re.fullmatch(r"[+-]?\d{1,18}", label) is not None


def _line_error(path: Path, number: int, message: str) -> DataError:
    return DataError(f"{path}, line {number}: {message}")
