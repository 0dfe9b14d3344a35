"""XTC and TRR files looked through, so that only whole and sound frames of them are decoded.

>>> atoms, offsets, rest = scan(Path("run-1.xtc"), 504)
>>> len(offsets), rest                                        # whole frames, and what is wrong with one more that follows
(1000, 'the file ends within this frame')
>>> xtc_overflows(Path("run-1.xtc"), offsets, atoms)          # frames whose compressed coordinates are damaged
[]

The decoder of MDAnalysis trusts every number in these files, and a damaged one ends the process.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

SUFFIXES: Final = (".xtc", ".trr")

_XTC_SMALL: Final = range(9, 73)  # numbers of bits that the format has for small distances


class Scan(NamedTuple):
    """The atoms of the first frame, where whole frames begin, and what is wrong with one more that follows."""

    atoms: int
    offsets: NDArray[np.int64]
    rest: str | None


def scan(path: Path, total: int) -> Scan:
    """Find the frames of `total` atoms, up to the first that makes no sense; none if the first has other atoms."""
    is_xtc = path.suffix.lower() == ".xtc"
    end_of = _xtc_end if is_xtc else _trr_end
    offsets: list[int] = []
    at, rest = 0, None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while at < len(content) and rest is None:
            try:
                atoms, end = end_of(content, at)
            except (ValueError, struct.error) as error:
                rest = f"the file makes no sense from offset {at} on ({error})"
                break
            if atoms != total:
                if not offsets:
                    return Scan(atoms, np.empty(0, np.int64), None)
                rest = f"it has {atoms} atoms, those before {total}"
            elif end > len(content):
                rest = "the file ends within this frame"
            else:
                offsets.append(at)
                at = end
    # MDAnalysis reads what it takes for the first two frames when it opens the file.
    first, is_packed = np.array(offsets[:2], np.int64), is_xtc and total > 9
    if (len(first) < 2 and rest is not None) or (is_packed and xtc_overflows(path, first, total)):
        raise DataError(f"{path} cannot be read as a trajectory: {rest or 'its first frames are damaged'}; restore it")
    return Scan(total, np.array(offsets, np.int64), rest)


def xtc_overflows(path: Path, offsets: NDArray[np.int64], atoms: int) -> list[int]:
    """Which of these frames would unpack to more atoms than there are, or need more bytes than they have.

    A frame is groups: one atom in `wide` bits, a flag, 5 bits if it is set, and the atoms that follow in `small` bits each; the 5
    bits tell how many these are from now on, and change `small`. All frames are gone through at once, group by group.
    """
    heads, contents = [], []
    with path.open("rb") as file:
        for at in offsets.tolist():
            file.seek(at + 60)
            *bounds, small, size = struct.unpack(">8i", file.read(32).ljust(32, b"\0"))
            spans = [high - low + 1 for low, high in zip(bounds[:3], bounds[3:], strict=True)]
            wide = math.prod(spans).bit_length() if max(spans) <= 0xFFFFFF else sum(min(span.bit_length(), 32) for span in spans)
            contents.append(file.read(size))
            heads.append((wide, small, len(contents[-1])))  # less than `size` if the file was cut meanwhile
    wide, small, size = np.array(heads, np.int64).reshape(-1, 3).T.copy()
    stream = np.zeros((len(heads), int(size.max(initial=0)) + 2), np.uint8)
    for row, content in zip(stream, contents, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    bit, done, follow = np.zeros((3, len(heads)), np.int64)
    sound, rows = np.ones(len(heads), np.bool_), np.arange(len(heads))
    while len(rows):
        bit[rows] += wide[rows]
        byte = np.minimum(bit[rows] >> 3, size[rows])
        six = ((stream[rows, byte].astype(np.int64) << 8 | stream[rows, byte + 1]) >> (10 - (bit[rows] & 7))) & 63
        flagged = six >= 32
        follow[rows] = np.where(flagged, (six - 32) // 3, follow[rows])
        bit[rows] += np.where(flagged, 6, 1) + follow[rows] * small[rows]
        small[rows] += np.where(flagged, (six - 32) % 3 - 1, 0)
        done[rows] += 1 + follow[rows]
        more = done[rows] < atoms
        within = (bit[rows] <= 8 * size[rows]) & (done[rows] <= atoms) & (~more | np.isin(small[rows], _XTC_SMALL))
        sound[rows] = within
        rows = rows[within & more]
    return np.flatnonzero(~sound).tolist()


def _trr_end(content: mmap.mmap, at: int) -> tuple[int, int]:
    """The atoms of the frame at this offset, and where it ends."""
    magic, _, length, name, *sizes, atoms, _, _ = struct.unpack_from(">3i12s13i", content, at)
    if (magic, length, name) != (1993, 12, b"GMX_trn_file") or atoms < 1:
        raise ValueError("no TRR header")
    _, _, box, virial, pressure, _, _, *vectors = sizes
    width = (box // 9 if box else max(vectors) // (3 * atoms)) if min(sizes) >= 0 else 0
    whole = {0, 9 * width}, {0, 3 * atoms * width}
    fits = {box, virial, pressure} <= whole[0] and set(vectors) <= whole[1] and not any((*sizes[:2], *sizes[5:7]))
    if width not in (4, 8) or not fits:
        raise ValueError(f"sizes {sizes}")
    return atoms, at + 76 + 2 * width + sum(sizes)


def _xtc_end(content: mmap.mmap, at: int) -> tuple[int, int]:
    """The atoms of the frame at this offset, and where it ends."""
    magic, atoms = struct.unpack_from(">2i", content, at)
    (again,) = struct.unpack_from(">i", content, at + 52)
    if magic != 1995 or atoms != again or atoms < 1:
        raise ValueError("no XTC header")
    if atoms <= 9:  # not compressed
        return atoms, at + 56 + 12 * atoms
    precision, *bounds, small, size = struct.unpack_from(">f8i", content, at + 56)
    if not (0 < precision < math.inf and all(low <= high for low, high in zip(bounds[:3], bounds[3:], strict=True))):
        raise ValueError(f"precision {precision}, bounds {bounds}")
    if small not in _XTC_SMALL or not 0 < size <= int(3.6 * atoms) * 4 - 12:
        raise ValueError(f"{size} bytes in steps of {small}")
    return atoms, at + 92 + (size + 3) // 4 * 4
