"""Matrices as text: a folder with one in each file, or one file with many of them; plain or compressed with gzip.

>>> source = open_text(Path("contact-maps"))                  # contact-maps/folded/0001.dat, …: the folders are the classes
>>> source.train.shape, source.train.dtype, source.classes
((28, 28, 1), dtype('uint8'), ('folded', 'unfolded'))
>>> open_text(Path("frames.txt"), shape=(28, 28)).train.count  # 784 numbers on each line; without shape: blank lines between
100000

Only the places of the matrices are found when a file is opened; `matrix.py` says how numbers may be written.
"""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.layout import listed
from deepex.data.source.matrix import MARK, MOST_BYTES, MatrixForm, Number, Text, decide, fields_of, fill
from deepex.data.source.part import check_same_classes, part_folders
from deepex.errors import DataError

SUFFIXES: Final = (".txt", ".dat", ".csv", ".asc")

_PIECE_BYTES: Final = 4 << 20  # of text, parsed at a time; its arrays of positions take some ten times that
_BLOCK_BYTES: Final = 1 << 20
_GAP_BYTES: Final = 64 << 10  # unwanted text that is cheaper read along than jumped over
_FIRST: Final = 16  # matrices that decide on shape and type
_NEWLINE, _HASH = b"\n#"
_IS_BLANK: Final = np.isin(np.arange(256), list(b" \t\r"))
_READ_ERRORS: Final = (OSError, EOFError, zlib.error)


@final
class TextFiles(Images):
    """One matrix in each file of a folder; `names` are relative to it."""

    busy = True

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        labels: NDArray[np.int64] | None,
        form: MatrixForm,
        *,
        shape: tuple[int, int],
        other: int,
    ) -> None:
        self._folder, self._names, self._form = folder, tuple(names), form
        self.count, self.shape, self.dtype, self.labels = len(names), (*shape, 1), form.dtype, labels
        self.description = {"format": "text, a matrix in each file", "files": len(names), "other_files": other}

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        bad: list[Bad] = []
        texts: dict[int, Text] = {}
        size = 0
        for place, number in enumerate(numbers.tolist()):
            try:
                texts[place] = Text(_whole(self._folder / self._names[number]), 1)
                size += len(texts[place].content)
            except DataError as error:
                bad.append(Bad(place, self.name(number), str(error)))
            if size > _PIECE_BYTES or place == len(numbers) - 1:
                bad += [Bad(at, self.name(int(numbers[at])), why) for at, why in fill(texts, out, self._form)]
                texts, size = {}, 0
        return sorted(bad)

    @override
    def name(self, number: int) -> str:
        return shown(self._folder / self._names[number])


@final
class TextMatrices(Images):
    """Many matrices in one file, whose places `offsets` (with the end) and `lines` were found beforehand."""

    busy = True

    def __init__(
        self, path: Path, offsets: NDArray[np.int64], lines: NDArray[np.int64], form: MatrixForm, shape: tuple[int, int]
    ) -> None:
        self._stream: tuple[int, IO[bytes]] | None = None
        self._path, self._offsets, self._lines, self._form = path, offsets, lines, form
        self.count, self.shape, self.dtype = len(lines), (*shape, 1), form.dtype
        self._is_packed = path.suffix == ".gz"
        mean_bytes = (offsets[-1] - offsets[0]) / self.count
        # A compressed file can only be read from its beginning.
        self.block = self.count if self._is_packed else min(self.count, max(1, round(_BLOCK_BYTES / mean_bytes)))
        self.description = {
            "format": "text, many matrices",
            "files": [shown(Path(path.name))],
            "lines": form.lines,
            "numbers": form.numbers,
        }

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        cuts = np.flatnonzero((np.diff(starts // _PIECE_BYTES) > 0) | (starts[1:] - ends[:-1] > _GAP_BYTES)) + 1
        bad: list[Bad] = []
        for places in np.split(np.arange(len(numbers)), cuts) if len(numbers) else ():
            texts = self._texts(numbers[places], places)
            bad += [Bad(at, self.name(int(numbers[at])), why) for at, why in fill(texts, out, self._form)]
        return bad

    @override
    def name(self, number: int) -> str:
        return f"{shown(self._path)} matrix {number} (line {self._lines[number]})"

    def close(self) -> None:
        """Close a compressed file, which reading keeps open."""
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    def _texts(self, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> dict[int, Text]:
        base, end = int(self._offsets[numbers[0]]), int(self._offsets[numbers[-1] + 1])
        try:
            span = self._span(base, min(end - base, _PIECE_BYTES + MOST_BYTES))
        except _READ_ERRORS as error:
            self.close()
            raise DataError(f"{shown(self._path)} cannot be read: {error}; restore it") from error
        starts, ends = self._offsets[numbers] - base, self._offsets[numbers + 1] - base
        bounds = zip(places.tolist(), starts.tolist(), ends.tolist(), self._lines[numbers].tolist(), strict=True)
        return {place: Text(span[first:last], line) for place, first, last, line in bounds}

    def _span(self, base: int, size: int) -> bytes:
        if not self._is_packed:
            with self._path.open("rb") as file:
                file.seek(base)
                return file.read(size)
        # Kept open: what lies before must be unpacked again otherwise. A fork shares the place in the file with its parent.
        if self._stream is None or self._stream[0] != os.getpid():
            self._stream = (os.getpid(), _opened(self._path))
        self._stream[1].seek(base)
        return self._stream[1].read(size)


def open_text(path: Path, *, shape: tuple[int, int] | None = None, dtype: Number | None = None) -> Source:
    """Open a folder or a file. `shape`: needed where each line is a matrix; `dtype`: instead of what the first ones suggest."""
    return _open_folder(path, shape, dtype) if path.is_dir() else _open_file(path, shape, dtype)


def shown(path: Path) -> str:
    """The name as it can be printed, also where it is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _open_folder(root: Path, shape: tuple[int, int] | None, dtype: Number | None) -> Source:
    files, _, folders = _sorted_files(root)
    parts = None if files else part_folders(folders, root)
    folder = root if parts is None else root / parts[0]
    names, classes, other = _find(folder)
    first = {}
    for number, name in enumerate(names[:_FIRST]):
        try:
            first[number] = Text(_whole(folder / name), 1)
        except DataError:  # told when it is read
            continue
    grid = None if shape is None else _grid(first, shape)
    form = decide(first, grid, dtype, f"{shown(folder)} (the first files, from {shown(folder / names[0])})")
    shape = shape or (form.lines, form.numbers)
    train = TextFiles(folder, names, _labels(names, classes), form, shape=shape, other=other)
    if parts is None or parts[1] is None:
        return Source(train=train, classes=_names(classes))
    train.description["other_files"] += len(folders) - len(parts)
    names, found, other = _find(root / parts[1])
    check_same_classes(_names(classes), _names(found), root)
    held = TextFiles(root / parts[1], names, _labels(names, found), form, shape=shape, other=other)
    return Source(train=train, validation=held, classes=_names(classes))


def _grid(texts: dict[int, Text], shape: tuple[int, int]) -> tuple[int, int]:
    """Lines and numbers of a matrix as it is written: one line, if most of the first texts have all numbers of `shape` on one."""
    size = shape[0] * shape[1]
    per_line = [_first_line([text.content]) == size for text in texts.values()]
    return (1, size) if 2 * sum(per_line) > len(per_line) else shape


def _names(classes: Sequence[str]) -> tuple[str, ...] | None:
    return tuple(shown(Path(name)) for name in classes) or None


def _labels(names: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64] | None:
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[os.path.dirname(name)] for name in names]) if classes else None


def _find(folder: Path) -> tuple[list[str], list[str], int]:
    """The files of matrices, the folders that are their classes, and how many other entries there are."""
    names, other, folders = _sorted_files(folder)
    if not names:
        for inner in folders:
            found, rest, _ = _sorted_files(folder / inner)
            if not found:
                raise DataError(
                    f"the class {shown(folder / inner)} has no file with {', '.join(SUFFIXES)}; fill it or take it away"
                )
            names += [os.path.join(inner, name) for name in found]
            other += rest
    elif folders:
        beside = listed([shown(Path(name)) for name in folders])
        raise DataError(f"{shown(folder)} has matrices beside the folders {beside}; put all into folders, one per class, or none")
    if not names:
        raise DataError(f"{shown(folder)} has no file with {', '.join(SUFFIXES)}; give a folder that has")
    return names, folders if os.path.dirname(names[0]) else [], other


def _sorted_files(folder: Path) -> tuple[list[str], int, list[str]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be read: {error.strerror}; check its permissions") from error
    # A link in a circle is no folder; DirEntry.is_dir would raise.
    folders = [entry.name for entry in entries if (os.path.isdir(entry) if entry.is_symlink() else entry.is_dir())]
    inner = set(folders)
    files = [e.name for e in entries if e.name.lower().removesuffix(".gz").endswith(SUFFIXES) and e.name not in inner]
    present = set(files)
    for name in files:
        if name + ".gz" in present:
            raise DataError(f"{shown(folder)} has both {shown(Path(name))} and {shown(Path(name))}.gz; keep one of them")
    return files, len(entries) - len(folders) - len(files), folders


def _open_file(path: Path, shape: tuple[int, int] | None, dtype: Number | None) -> Source:
    try:
        per_line = shape is not None and _first_line(_pieces(path)) == shape[0] * shape[1]
        offsets, lines = _index(path, per_line=per_line)
        if not len(lines):
            raise DataError(f"{shown(path)} has no numbers; give a file with at least one matrix")
        with _opened(path) as stream:
            first = {n: Text(_exactly(stream, offsets, n), int(lines[n])) for n in range(min(_FIRST, len(lines)))}
    except _READ_ERRORS as error:
        raise DataError(f"{shown(path)} cannot be read: {error}; restore it") from error
    grid = shape if shape is None or not per_line else (1, shape[0] * shape[1])
    form = decide(first, grid, dtype, shown(path))
    if len(lines) == 1 and shape is None:
        raise DataError(
            f"{shown(path)} has no blank line, so it is one matrix of {form.lines} x {form.numbers}; put blank lines between "
            "matrices, or say with --matrix HEIGHTxWIDTH that each line is one"
        )
    return Source(train=TextMatrices(path, offsets, lines, form, shape if shape is not None else (form.lines, form.numbers)))


def _exactly(stream: IO[bytes], offsets: NDArray[np.int64], number: int) -> bytes:
    stream.seek(int(offsets[number]))
    return stream.read(min(MOST_BYTES + 1, int(offsets[number + 1] - offsets[number])))


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value] # gzip's is no IO to mypy


def _whole(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            content = file.read(MOST_BYTES + 1)
    except _READ_ERRORS as error:
        raise DataError(f"it cannot be read: {error}; restore it") from error
    if len(content) > MOST_BYTES:
        raise DataError(f"it has more than {MOST_BYTES} bytes, the limit for one matrix; is it many? Give the file itself")
    return content


def _pieces(path: Path) -> Iterator[bytes]:
    """The text in pieces of whole lines."""
    rest = b""
    with _opened(path) as file:
        while piece := file.read(_PIECE_BYTES):
            end = piece.rfind(b"\n") + 1
            if end:
                yield rest + piece[:end]
                rest = piece[end:]
            else:
                rest += piece
            if len(rest) > MOST_BYTES:
                raise DataError(f"{shown(path)} has a line of more than {MOST_BYTES} bytes; is it text?")
    if rest:
        yield rest + b"\n"


def _first_line(pieces: Iterable[bytes]) -> int:
    """How many numbers the first line that has any has."""
    for piece in pieces:
        for line in piece.removeprefix(MARK).split(b"\n"):
            if fields := fields_of(line):
                return len(fields)
    return 0


def _index(path: Path, *, per_line: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each matrix begins, with the end of the last; and on which line. One is a line, or what stands between blank lines."""
    offsets, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    offset, line, inside = 0, 1, False
    for piece in _pieces(path):
        text = piece if offset or not piece.startswith(MARK) else b"   " + piece[3:]
        starts, first = _line_starts(text)
        counted = np.flatnonzero(first != _HASH)
        filled = first[counted] != _NEWLINE
        before = np.concatenate([[inside], filled])[:-1]
        begins = counted[filled if per_line else filled & ~before]
        offsets.append(starts[begins] + offset)
        numbers.append(begins + line)
        inside = bool(filled[-1]) if len(filled) else inside
        offset, line = offset + len(piece), line + len(starts)
    return np.concatenate([*offsets, [offset]]), np.concatenate(numbers)


def _line_starts(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where each line begins, and the first byte of it that is no blank (the line's end if there is none)."""
    values = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(values == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    at = starts.copy()
    for _ in range(64):
        blank = np.flatnonzero(_IS_BLANK[values[at]])
        if not len(blank):
            return starts, values[at]
        at[blank] += 1
    for line in blank.tolist():
        at[line] = ends[line] - len(text[at[line] : ends[line]].lstrip(b" \t\r"))
    return starts, values[at]
