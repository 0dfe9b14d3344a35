"""Matrices as text: a folder with one in each file, or one file with many of them; plain or compressed with gzip.

>>> source = open_text(Path("contact-maps"))                  # contact-maps/folded/0001.dat, …: the folders are the classes
>>> source.train.shape, source.train.dtype, source.classes
((28, 28, 1), dtype('uint8'), ('folded', 'unfolded'))
>>> open_text(Path("frames.txt"), shape=(28, 28)).train.count  # 784 numbers on each line; without shape: blank lines between
100000

Numbers are separated by blanks, tabs or commas; `#` begins a comment. Matrices are parsed many at a time; only where that fails
each is looked at on its own, and the line that is wrong is found.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.layout import listed
from deepex.errors import DataError

SUFFIXES: Final = (".txt", ".dat", ".csv", ".asc")
Number = Literal["uint8", "float32"]

_PIECE_BYTES: Final = 4 << 20  # of text, parsed at a time; its arrays of positions take some ten times that
_MOST_BYTES: Final = 256 << 20  # of one matrix
_BLOCK_BYTES: Final = 1 << 20
_GAP_BYTES: Final = 64 << 10  # unwanted text that is cheaper read along than jumped over
_FIRST: Final = 16  # matrices that decide on shape and type
_MARK: Final = b"\xef\xbb\xbf"  # what some editors put before UTF-8
_NUMBER: Final = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BLANK_LINE: Final = re.compile(rb"\n[ \t\r]*\n")
_COMMENT: Final = re.compile(rb"(?m)^[ \t]*#[^\n]*\n?|#[^\n]*")
_NEWLINE, _HASH, _COMMA = b"\n#,"
_IS_BLANK: Final = np.isin(np.arange(256), list(b" \t\r"))
_ZERO: Final = np.uint8(ord("0"))
_READ_ERRORS: Final = (OSError, EOFError, zlib.error)


class Form(NamedTuple):
    """A matrix as written: `lines` of `numbers` each, to be stored as `dtype`."""

    lines: int
    numbers: int
    dtype: np.dtype[Any]


class _Text(NamedTuple):
    """The text of a matrix and the line of the file that it begins on."""

    content: bytes
    line: int


@final
class TextFiles(Images):
    """One matrix in each file of a folder; `names` are relative to it."""

    busy = True

    def __init__(self, folder: Path, names: Sequence[str], labels: NDArray[np.int64] | None, form: Form, other: int) -> None:
        self._folder, self._names, self._form = folder, tuple(names), form
        self.count, self.shape, self.dtype, self.labels = len(names), (form.lines, form.numbers, 1), form.dtype, labels
        self.description = {"format": "text, a matrix in each file", "files": len(names), "other_files": other}

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:  # noqa: D102 - see the base
        bad: list[Bad] = []
        texts: dict[int, _Text] = {}
        size = 0
        for place, number in enumerate(numbers.tolist()):
            try:
                texts[place] = _Text(_whole(self._folder / self._names[number]), 1)
                size += len(texts[place].content)
            except DataError as error:
                bad.append(Bad(place, self.name(number), str(error)))
            if size > _PIECE_BYTES or place == len(numbers) - 1:
                bad += [Bad(at, self.name(int(numbers[at])), why) for at, why in _fill(texts, out, self._form)]
                texts, size = {}, 0
        return sorted(bad)

    def name(self, number: int) -> str:  # noqa: D102
        return shown(self._folder / self._names[number])


@final
class TextMatrices(Images):
    """Many matrices in one file, whose places `offsets` (with the end) and `lines` were found beforehand."""

    busy = True

    def __init__(
        self, path: Path, offsets: NDArray[np.int64], lines: NDArray[np.int64], form: Form, shape: tuple[int, int]
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

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:  # noqa: D102
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        cuts = np.flatnonzero((np.diff(starts // _PIECE_BYTES) > 0) | (starts[1:] - ends[:-1] > _GAP_BYTES)) + 1
        bad: list[Bad] = []
        for places in np.split(np.arange(len(numbers)), cuts) if len(numbers) else ():
            texts = self._texts(numbers[places], places)
            bad += [Bad(at, self.name(int(numbers[at])), why) for at, why in _fill(texts, out, self._form)]
        return bad

    def name(self, number: int) -> str:  # noqa: D102
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

    def _texts(self, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> dict[int, _Text]:
        base, end = int(self._offsets[numbers[0]]), int(self._offsets[numbers[-1] + 1])
        try:
            span = self._span(base, min(end - base, _PIECE_BYTES + _MOST_BYTES))
        except _READ_ERRORS as error:
            self.close()
            raise DataError(f"{shown(self._path)} cannot be read: {error}; restore it") from error
        starts, ends = self._offsets[numbers] - base, self._offsets[numbers + 1] - base
        bounds = zip(places.tolist(), starts.tolist(), ends.tolist(), self._lines[numbers].tolist(), strict=True)
        return {place: _Text(span[first:last], line) for place, first, last, line in bounds}

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


def _open_folder(folder: Path, shape: tuple[int, int] | None, dtype: Number | None) -> Source:
    names, classes, other = _find(folder)
    first = {}
    for number, name in enumerate(names[:_FIRST]):
        try:
            first[number] = _Text(_whole(folder / name), 1)
        except DataError:  # told when it is read
            continue
    form = _decide(first, shape, dtype, f"{shown(folder)} (the first files, from {shown(folder / names[0])})")
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[os.path.dirname(name)] for name in names]) if classes else None
    train = TextFiles(folder, names, labels, form, other)
    return Source(train=train, classes=tuple(shown(Path(name)) for name in classes) or None)


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
        per_line = shape is not None and _first_line(path) == shape[0] * shape[1]
        offsets, lines = _index(path, per_line=per_line)
        if not len(lines):
            raise DataError(f"{shown(path)} has no numbers; give a file with at least one matrix")
        with _opened(path) as stream:
            first = {n: _Text(_exactly(stream, offsets, n), int(lines[n])) for n in range(min(_FIRST, len(lines)))}
    except _READ_ERRORS as error:
        raise DataError(f"{shown(path)} cannot be read: {error}; restore it") from error
    grid = shape if shape is None or not per_line else (1, shape[0] * shape[1])
    form = _decide(first, grid, dtype, shown(path))
    if len(lines) == 1 and shape is None:
        raise DataError(
            f"{shown(path)} has no blank line, so it is one matrix of {form.lines} x {form.numbers}; put blank lines between "
            "matrices, or say with --matrix HEIGHTxWIDTH that each line is one"
        )
    return Source(train=TextMatrices(path, offsets, lines, form, shape if shape is not None else (form.lines, form.numbers)))


def _exactly(stream: IO[bytes], offsets: NDArray[np.int64], number: int) -> bytes:
    stream.seek(int(offsets[number]))
    return stream.read(min(_MOST_BYTES + 1, int(offsets[number + 1] - offsets[number])))


def _decide(texts: dict[int, _Text], shape: tuple[int, int] | None, dtype: Number | None, where: str) -> Form:
    """Take shape and type from the first matrices that can be read."""
    reasons, arrays = [], []
    for text in texts.values():
        try:
            array = _parsed(_bare(text.content))
        except ValueError:
            array = np.full((0, 0), np.nan)
        if array.size and np.isfinite(array).all() and array.shape == (shape or array.shape):
            arrays.append(array)
        else:
            lines, numbers = shape or (0, 0)
            reasons.append(_fault(text, Form(lines, numbers, np.dtype(np.float32))))
    if not arrays:
        raise DataError(f"{where} cannot be read as matrices: {(reasons or ['no file can be opened'])[0]}")
    is_bytes = all((array == np.clip(np.rint(array), 0, 255)).all() for array in arrays)
    lines, numbers = arrays[0].shape
    return Form(lines, numbers, np.dtype(dtype or ("uint8" if is_bytes else "float32")))


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _whole(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except _READ_ERRORS as error:
        raise DataError(f"it cannot be read: {error}; restore it") from error
    if len(content) > _MOST_BYTES:
        raise DataError(f"it has more than {_MOST_BYTES} bytes, the limit for one matrix; is it many? Give the file itself")
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
            if len(rest) > _MOST_BYTES:
                raise DataError(f"{shown(path)} has a line of more than {_MOST_BYTES} bytes; is it text?")
    if rest:
        yield rest + b"\n"


def _first_line(path: Path) -> int:
    """How many numbers the first line that has any has."""
    for piece in _pieces(path):
        for line in piece.removeprefix(_MARK).split(b"\n"):
            if fields := _fields(line):
                return len(fields)
    return 0


def _index(path: Path, *, per_line: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each matrix begins, with the end of the last; and on which line. One is a line, or what stands between blank lines."""
    offsets, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    offset, line, inside = 0, 1, False
    for piece in _pieces(path):
        text = piece if offset or not piece.startswith(_MARK) else b"   " + piece[3:]
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


def _fill(texts: dict[int, _Text], out: NDArray[Any], form: Form) -> list[tuple[int, str]]:
    """Parse the matrices into the rows of `out` that are their keys, all together if they are all well."""
    bare = {place: _bare(text.content) for place, text in texts.items()}
    places = list(bare)
    if all(text.count(b"\n") == form.lines - 1 for text in bare.values()):
        values = _values(b"\n".join(bare.values()), len(bare), form)
        if values is not None:
            rows = slice(places[0], places[-1] + 1) if places and places[-1] - places[0] == len(places) - 1 else places
            out[rows] = values.reshape(-1, *out.shape[1:])
            return []
    bad = []
    for place, text in bare.items():
        is_one = len(text) <= _MOST_BYTES and not _BLANK_LINE.search(text)
        values = _values(text, 1, form) if is_one else None
        if values is None:
            bad.append((place, _fault(texts[place], form)))
        else:
            out[place] = values.reshape(out.shape[1:])
    return bad


def _bare(text: bytes) -> bytes:
    """The text without its comments and without blank lines around it."""
    text = text.removeprefix(_MARK)
    return (_COMMENT.sub(b"", text) if b"#" in text else text).strip(b" \t\r\n")


def _values(text: bytes, count: int, form: Form) -> NDArray[Any] | None:
    """The numbers of so many matrices in the type wanted, or None if anything is not as it should be."""
    small = None if b"." in text[:1000] else _small_integers(text, count * form.lines, form.numbers)
    if small is not None:
        return small.astype(form.dtype, copy=False)
    try:
        values = _parsed(text)
    except ValueError:
        return None
    if values.shape != (count * form.lines, form.numbers):
        return None
    if form.dtype == np.uint8:
        return values.astype(np.uint8) if (values == np.clip(np.rint(values), 0, 255)).all() else None
    with np.errstate(over="ignore"):
        single = values.astype(form.dtype)
    return single if np.isfinite(single).all() else None


def _parsed(text: bytes) -> NDArray[np.float64]:
    """What numpy makes of the text; ValueError for words, and for lines of different lengths."""
    plain = (text.replace(b"\r\n", b"\n") if b"\r" in text else text).decode("ascii")
    if not plain.strip():
        raise ValueError
    lines = plain.split("\n")
    return np.loadtxt(lines, np.float64, comments=None, delimiter="," if "," in lines[0] else None, ndmin=2)


def _small_integers(text: bytes, lines: int, numbers: int) -> NDArray[np.uint8] | None:
    """Parse plain integers from 0 to 255 in a few passes over all bytes, at 2 to 5 times the speed of a parser; else None."""
    bytes_ = np.frombuffer(text + b"\n", np.uint8)
    digit = bytes_ - _ZERO < 10
    if len(bytes_) == 2 * lines * numbers:
        single = _single_digits(bytes_.reshape(lines, numbers, 2), digit.reshape(lines, numbers, 2))
        if single is not None:
            return single
    plain = digit.copy()
    for other in b" \n\t\r,":
        plain |= bytes_ == other
    if not plain.all():
        return None
    changes = np.flatnonzero(np.diff(digit, prepend=False))
    starts, lengths = changes[::2], changes[1::2] - changes[::2]
    if len(starts) != lines * numbers or not len(starts) or lengths.max() > 3:
        return None
    broken = np.searchsorted(starts, np.flatnonzero(bytes_ == _NEWLINE))
    if not np.array_equal(broken, np.arange(1, lines + 1) * numbers) or (b"," in text and not _commas_fit(bytes_, starts, numbers)):
        return None
    values = bytes_[starts].astype(np.int16) - _ZERO
    for extra in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > extra)
        values[longer] = values[longer] * 10 + (bytes_[starts[longer] + extra] - _ZERO)
    return values.astype(np.uint8).reshape(lines, numbers) if values.max() <= 255 else None


def _single_digits(pairs: NDArray[np.uint8], digit: NDArray[np.bool_]) -> NDArray[np.uint8] | None:
    """Digits with one separator between them, as contact maps are mostly printed: nothing has to be searched for."""
    after, between = pairs[:, -1, 1], pairs[:, :-1, 1]
    if not digit[..., 0].all() or (after != _NEWLINE).any():
        return None
    if between.size and (between[0, 0] not in b" \t," or (between != between[0, 0]).any()):
        return None
    return pairs[..., 0] - _ZERO


def _commas_fit(bytes_: NDArray[np.uint8], starts: NDArray[np.int64], numbers: int) -> bool:
    """Whether there is exactly one comma before each number but the first of a line."""
    commas = np.flatnonzero(bytes_ == _COMMA)
    return np.array_equal(np.searchsorted(starts, commas), np.flatnonzero(np.arange(len(starts)) % numbers))


def _fields(line: bytes) -> list[bytes]:
    data = line.partition(b"#")[0].strip()
    if not data:
        return []
    return [field.strip() for field in data.split(b",")] if b"," in data else data.split()


def _fault(text: _Text, form: Form) -> str:
    """What is wrong with a matrix that could not be read, and on which line."""
    if len(text.content) > _MOST_BYTES:
        return f"from line {text.line} on it has more than {_MOST_BYTES} bytes, the limit for one matrix"
    lines, width, gap = 0, form.numbers, 0
    for number, line in enumerate(text.content.removeprefix(_MARK).split(b"\n"), text.line):
        if fields := _fields(line):
            if lines and gap:
                return f"line {gap} is blank, and more numbers follow on line {number}; a file in a folder holds one matrix only"
            width = width or len(fields)
            if why := _line_fault(fields, width, form.dtype):
                return f"line {number} {why}"
            lines, gap = lines + 1, 0
        elif not line.strip() and lines:
            gap = gap or number
    if lines != (form.lines or lines) or not lines:
        expected = f", where {form.lines} are expected" if form.lines else ""
        return f"from line {text.line} on it has {lines} lines of numbers{expected}; all matrices must have one size"
    return f"from line {text.line} on it is separated in more than one way; use blanks, or commas on every line"


def _line_fault(fields: list[bytes], width: int, dtype: np.dtype[Any]) -> str | None:
    for field in fields:
        word = field[:40].decode("ascii", "backslashreplace")
        if not field:
            return "has a comma with no number beside it; give every number"
        if not _NUMBER.fullmatch(field):
            kind = "not finite" if re.fullmatch(rb"(?i)[+-]?(nan|inf|infinity)", field) else "not a number"
            return f"has {word!r}, which is {kind}; correct it or leave the matrix out"
        value = float(field)
        if dtype == np.uint8 and not (value.is_integer() and 0 <= value <= 255):
            return f"has {word}, but the first matrices hold integers from 0 to 255 only; pack with --dtype float32"
        if abs(value) > float(np.finfo(np.float32).max):
            return f"has {word}, which is too large for float32; scale the values"
    if len(fields) != width:
        return f"has {len(fields)} numbers, where {width} are expected; all lines must have equally many"
    return None
