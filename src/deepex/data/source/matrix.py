r"""Matrices from the bytes of a text: their numbers all at once, or what is wrong with one and on which line.

>>> texts = {0: Text(b"1 2\n3 4\n", line=1), 1: Text(b"5 6\n7 x\n", line=4)}
>>> form = decide(texts, shape=None, dtype=None, where="frames.txt")       # from those that can be read: 2 lines of 2, uint8
>>> out = np.empty((2, form.lines, form.numbers, 1), form.dtype)
>>> fill(texts, out, form)                                                 # the places of the bad ones, and why
[(1, "line 5 has 'x', which is not a number; correct it or leave the matrix out")]

Numbers are separated by blanks, tabs or commas; `#` begins a comment. Matrices are parsed many at a time; only where that fails
each is looked at on its own, and the line that is wrong is found.
"""

import re
from collections import Counter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

Number = Literal["uint8", "float32"]

MOST_BYTES: Final = 256 << 20  # of one matrix
MARK: Final = b"\xef\xbb\xbf"  # what some editors put before UTF-8
_NUMBER: Final = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BLANK_LINE: Final = re.compile(rb"\n[ \t\r]*\n")
_COMMENT: Final = re.compile(rb"(?m)^[ \t]*#[^\n]*\n?|#[^\n]*")
_NEWLINE, _COMMA = b"\n,"
_ZERO: Final = np.uint8(ord("0"))


class MatrixForm(NamedTuple):
    """A matrix as written: `lines` of `numbers` each, to be stored as `dtype`."""

    lines: int
    numbers: int
    dtype: np.dtype[Any]


class Text(NamedTuple):
    """The text of a matrix and the line of the file that it begins on."""

    content: bytes
    line: int


def decide(texts: dict[int, Text], shape: tuple[int, int] | None, dtype: Number | None, where: str) -> MatrixForm:
    """Take shape and type from most of the first matrices that can be read."""
    reasons, arrays = [], []
    for text in texts.values():
        try:
            bare = _bare(text.content)
            array = np.empty((0, 0)) if _BLANK_LINE.search(bare) else _parsed(bare)
        except ValueError:
            array = np.full((0, 0), np.nan)
        if array.size and np.isfinite(array).all() and array.shape == (shape or array.shape):
            arrays.append(array)
        else:
            lines, numbers = shape or (0, 0)
            reasons.append(_fault(text, MatrixForm(lines, numbers, np.dtype(np.float32))))
    if not arrays:
        raise DataError(f"{where} cannot be read as matrices: {(reasons or ['no file can be opened'])[0]}")
    lines, numbers = Counter(array.shape for array in arrays).most_common(1)[0][0]  # of equals the first
    alike = [array for array in arrays if array.shape == (lines, numbers)]
    is_bytes = all((array == np.clip(np.rint(array), 0, 255)).all() for array in alike)
    return MatrixForm(lines, numbers, np.dtype(dtype or ("uint8" if is_bytes else "float32")))


def fill(texts: dict[int, Text], out: NDArray[Any], form: MatrixForm) -> list[tuple[int, str]]:
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
        is_one = len(text) <= MOST_BYTES and not _BLANK_LINE.search(text)
        values = _values(text, 1, form) if is_one else None
        if values is None:
            bad.append((place, _fault(texts[place], form)))
        else:
            out[place] = values.reshape(out.shape[1:])
    return bad


def _bare(text: bytes) -> bytes:
    """The text without its comments and without blank lines around it."""
    text = text.removeprefix(MARK)
    return (_COMMENT.sub(b"", text) if b"#" in text else text).strip(b" \t\r\n")


def _values(text: bytes, count: int, form: MatrixForm) -> NDArray[Any] | None:
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


def fields_of(line: bytes) -> list[bytes]:
    """What stands between the separators of a line, its comment left out."""
    data = line.partition(b"#")[0].strip()
    if not data:
        return []
    return [field.strip() for field in data.split(b",")] if b"," in data else data.split()


def _fault(text: Text, form: MatrixForm) -> str:
    """What is wrong with a matrix that could not be read, and on which line."""
    if len(text.content) > MOST_BYTES:
        return f"from line {text.line} on it has more than {MOST_BYTES} bytes, the limit for one matrix"
    lines, width, gap = 0, form.numbers, 0
    for number, line in enumerate(text.content.removeprefix(MARK).split(b"\n"), text.line):
        if fields := fields_of(line):
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
