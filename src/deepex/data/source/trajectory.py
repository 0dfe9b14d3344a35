"""Trajectories of molecular dynamics as contact maps: which of the chosen atoms are nearer to each other than a cut-off.

>>> source = open_trajectory(Path("bba.pdb"), [Path("run-1.dcd"), Path("run-2.dcd")], select="name CA", cutoff=8.0)
>>> source.train.count, source.train.shape                    # frames, (atoms, atoms, 1)
(100000, (28, 28, 1))

Any format that MDAnalysis reads will do. The atoms are chosen once, in the first frame; an atom is in contact with itself.
XTC and TRR files are looked through here before MDAnalysis reads them: its decoder trusts every number in them, and a damaged one
ends the process.
"""

import math
import mmap
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import Bad, Images, Source
from deepex.errors import DataError

_BLOCK: Final = 1000
_MOST_WALKED: Final = 1000  # atoms up to which the looking through of XTC frames costs less than their decoding
_XTC_SMALL: Final = range(9, 73)  # numbers of bits that the format has for small distances
_SERIES: Final = 4  # frames in a row that are worth a call of their own
_PIECE_BYTES: Final = 2 << 20  # of squared distances, so that they stay in the cache of a core
# What the readers of MDAnalysis were seen to raise for damaged files, and for formats whose library is not installed.
_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    struct.error,
)


class Frames(NamedTuple):
    """A trajectory file: its whole frames, what is wrong with one more that follows, and where they begin (XTC, TRR)."""

    path: Path
    whole: int
    rest: str | None
    offsets: NDArray[np.int64] | None


class _Chosen(NamedTuple):
    """As much of an AtomGroup as reading needs: the topology stays behind when this goes to another process."""

    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)


@final
class TrajectoryImages(Images):
    """The contact maps of every `stride`-th frame, file after file, the stride beginning anew with each file."""

    busy = True

    def __init__(
        self, files: Sequence[Frames], atoms: NDArray[np.int64], total: int, *, cutoff: float, stride: int, pbc: bool
    ) -> None:
        self._files, self._atoms, self._total = tuple(files), _Chosen(atoms), total
        self._cutoff, self._stride, self._pbc = cutoff, stride, pbc
        self._starts = np.cumsum([0, *(-(-(file.whole + (file.rest is not None)) // stride) for file in files)])
        self.count, self.shape, self.dtype = int(self._starts[-1]), (len(atoms), len(atoms), 1), np.dtype(np.uint8)
        self.block = min(_BLOCK, self.count)
        self.description = {"format": "trajectory", "files": [file.path.name for file in files], "cutoff": cutoff, "stride": stride}
        self._forget()

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:  # noqa: D102 - see the base
        most = max(1, _PIECE_BYTES // (8 * len(self._atoms) ** 2))
        bad: list[Bad] = []
        for file, (begin, end) in enumerate(pairwise(np.searchsorted(numbers, self._starts).tolist())):
            for first in range(begin, end, most):
                last = min(first + most, end)
                frames = (numbers[first:last] - self._starts[file]) * self._stride
                with _quiet():
                    found = self._read_piece(file, frames, out[first:last, ..., 0])
                bad += [Bad(first + place, self.name(int(numbers[first + place])), why) for place, why in sorted(found.items())]
        return bad

    def name(self, number: int) -> str:  # noqa: D102
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        return f"{self._files[file].path} frame {(number - self._starts[file]) * self._stride}"

    def close(self) -> None:
        """Close the file of this process; reading opens it again."""
        if self._open is not None and self._open[0] == os.getpid():
            self._open[2].close()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def _forget(self) -> None:
        self._open: tuple[int, int, Any] | None = None

    def _read_piece(self, file: int, frames: NDArray[np.int64], out: NDArray[Any]) -> dict[int, str]:
        """Read ascending frames of one file; the reasons for those that cannot be."""
        places = np.zeros((len(frames), len(self._atoms), 3), np.float32)
        boxes: list[NDArray[Any] | None] = [None] * len(frames)
        bad = self._damaged(file, frames)
        rows = np.setdiff1d(np.arange(len(frames)), list(bad))
        for run in np.split(rows, np.flatnonzero(np.diff(frames[rows]) != self._stride) + 1) if len(rows) else ():
            if self._read_series(file, frames[run], places[run[0] : run[-1] + 1]):
                continue
            for row in run.tolist():
                try:
                    boxes[row] = self._read_frame(file, int(frames[row]), places[row])
                except _ERRORS as error:
                    self.close()
                    bad[row] = f"it cannot be read: {_short(error)}; leave the frame out, or restore the file"
        for row in np.flatnonzero(~np.isfinite(places).all(axis=(1, 2))).tolist():
            atom = int(np.argmin(np.isfinite(places[row]).all(axis=1)))
            at = places[row, atom].tolist()
            bad.setdefault(row, f"atom {self._atoms.indices[atom]} is at {at}; coordinates must be finite: leave the frame out")
            places[row] = 0
        if not self._pbc:
            contacts(places, self._cutoff, out)
        for row, box in enumerate(boxes):
            if box is not None and row not in bad:
                _periodic_contacts(places[row], box, self._cutoff, out[row])
        return bad

    def _damaged(self, file: int, frames: NDArray[np.int64]) -> dict[int, str]:
        """The rows of `frames` that must not be read, and why."""
        path, whole, rest, offsets = self._files[file]
        bad = {len(frames) - 1: f"{rest}; leave it out, or restore the file"} if frames[-1] >= whole else {}
        if offsets is not None and path.suffix.lower() == ".xtc" and 9 < self._total <= _MOST_WALKED:
            _check_file(path, "trajectory")
            wrong = _xtc_overflows(path, offsets[frames[frames < whole]], self._total)
            bad |= dict.fromkeys(wrong, "its compressed coordinates are damaged; leave the frame out, or restore the file")
        return bad

    def _read_series(self, file: int, frames: NDArray[np.int64], places: NDArray[Any]) -> bool:
        """Read evenly spaced frames in one go, several times as fast; False if that is not possible."""
        if self._pbc or len(frames) < _SERIES:
            return False
        try:
            bounds = {"start": int(frames[0]), "stop": int(frames[-1]) + 1, "step": self._stride}
            places[:] = self._reader(file).timeseries(atomgroup=self._atoms, order="fac", **bounds)
        except _ERRORS:
            self.close()
            return False
        return True

    def _read_frame(self, file: int, frame: int, places: NDArray[Any]) -> NDArray[Any] | None:
        """Write the coordinates of one frame into `places`; its box if that is asked for."""
        step = self._reader(file)[frame]
        places[:] = step.positions[self._atoms.indices]
        if not self._pbc:
            return None
        box: NDArray[Any] | None = step.dimensions
        if box is None:  # also where a PDB file has one box for all its models
            raise ValueError("the frame has no periodic box, which distances to the nearest image need")
        if not np.isfinite(box).all() or (box <= 0).any():
            raise ValueError(f"its periodic box is {box.tolist()}, where lengths and angles must be positive")
        return box

    def _reader(self, file: int) -> Any:
        if self._open is None or self._open[:2] != (os.getpid(), file):
            self.close()
            frames = self._files[file]
            _check_file(frames.path, "trajectory")
            self._open = (os.getpid(), file, _opened(frames.path, self._total, frames.offsets))
        return self._open[2]


def contacts(positions: NDArray[Any], cutoff: float, out: NDArray[Any]) -> None:
    """Write into `out` (frames, n, n) which of the `positions` (frames, n, 3) are nearer to each other than `cutoff`."""
    squares = np.zeros((len(positions), positions.shape[1], positions.shape[1]))
    apart = np.empty_like(squares)
    for axis in np.moveaxis(positions.astype(np.float64), 2, 0):
        np.subtract(axis[:, :, np.newaxis], axis[:, np.newaxis, :], out=apart)
        squares += np.multiply(apart, apart, out=apart)
    np.less(squares, cutoff**2, out=out, casting="unsafe")


def _periodic_contacts(places: NDArray[Any], box: NDArray[Any], cutoff: float, out: NDArray[Any]) -> None:
    from MDAnalysis.lib.distances import distance_array

    np.less(distance_array(places, places, box=box), cutoff, out=out, casting="unsafe")


def open_trajectory(
    topology: Path,
    trajectories: Sequence[Path],
    *,
    select: str = "name CA",
    cutoff: float = 8.0,
    stride: int = 1,
    pbc: bool = False,
) -> Source:
    """Open trajectories of the atoms in `topology`; `cutoff` in Å; with `pbc`, distances are those to the nearest image."""
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise DataError(f"the cut-off is {cutoff}; it must be a distance in Å above 0")
    if stride < 1:
        raise DataError(f"the stride is {stride}; it must be 1 (every frame) or more")
    if not trajectories:
        raise DataError("no trajectory was given; name at least one file")
    universe = _universe(topology)
    total = len(universe.atoms)
    files = [_frames(path, topology, total) for path in trajectories]
    atoms = _select(universe, topology, select, files[0])
    train = TrajectoryImages(files, atoms, total, cutoff=cutoff, stride=stride, pbc=pbc)
    train.description |= {"topology": topology.name, "select": select, "periodic": pbc, "atoms": len(atoms)}
    return Source(train=train)


def _universe(topology: Path) -> Any:
    """The atoms with their names; no coordinates yet."""
    try:
        with _quiet():
            import MDAnalysis
            from MDAnalysis.core._get_readers import get_parser_for
    except ImportError as error:
        raise DataError(
            f"trajectories need MDAnalysis, which cannot be imported ({error}); pip install 'deepex[science]'"
        ) from error
    _check_file(topology, "topology")
    try:
        with _quiet(), get_parser_for(str(topology))(str(topology)) as parser:
            return MDAnalysis.Universe(parser.parse())
    except _ERRORS as error:
        raise DataError(
            f"{topology} cannot be read as a topology: {_short(error)}; give a file such as .pdb, .psf or .prmtop"
        ) from error


def _select(universe: Any, topology: Path, select: str, trajectory: Frames) -> NDArray[np.int64]:
    from MDAnalysis.exceptions import SelectionError

    try:
        with _quiet():
            # "around 5 protein" asks for coordinates
            universe.trajectory = _opened(trajectory.path, len(universe.atoms), trajectory.offsets)
            atoms = universe.select_atoms(select).ix.astype(np.int64)
            universe.trajectory.close()
    except (*_ERRORS, SelectionError) as error:
        raise DataError(
            f"the selection {select!r} cannot be made in {topology}: {_short(error)}; write it as for MDAnalysis, e.g. 'name CA'"
        ) from error
    if len(atoms) < 2:
        raise DataError(
            f"the selection {select!r} matches {len(atoms)} of the {len(universe.atoms)} atoms of {topology}; a contact map needs "
            "2 or more: choose others"
        )
    return np.sort(atoms)


def _frames(path: Path, topology: Path, total: int) -> Frames:
    _check_file(path, "trajectory")
    try:
        if path.suffix.lower() in _FRAME_ENDS:
            return _scanned(path, topology, total)
        with _quiet():
            reader = _opened(path, total, None)
            atoms, whole, rest = int(reader.n_atoms), int(reader.n_frames), _rest_of_dcd(reader, path)
            reader.close()
    except _ERRORS as error:
        with suppress(*_ERRORS), _quiet():  # a PDB file of more atoms fails as if it were damaged
            other = _opened(path, None, None)
            other.close()
            if other.n_atoms != total:
                raise _mismatch(path, other.n_atoms, topology, total) from error
        raise DataError(f"{path} cannot be read as a trajectory: {_short(error)}; restore it, or give another kind") from error
    if atoms != total:
        raise _mismatch(path, atoms, topology, total)
    if whole < 1:
        raise DataError(f"{path} has no whole frame; leave it out")
    return Frames(path, whole, rest, None)


def _mismatch(path: Path, atoms: int, topology: Path, total: int) -> DataError:
    return DataError(f"{path} has {atoms} atoms, {topology} has {total}; give the topology that the trajectory was made with")


def _rest_of_dcd(reader: Any, path: Path) -> str | None:
    """What the reader passes over silently: bytes behind the last whole frame."""
    if reader.format != "DCD" or not hasattr(reader._file, "_framesize"):
        return None
    later = path.stat().st_size - reader._file._header_size - reader._file._firstframesize
    return "the file ends within this frame" if later % reader._file._framesize else None


def _scanned(path: Path, topology: Path, total: int) -> Frames:
    """Find the frames of an XTC or TRR file, up to the first that makes no sense."""
    end_of = _FRAME_ENDS[path.suffix.lower()]
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
                    raise _mismatch(path, atoms, topology, total)
                rest = f"it has {atoms} atoms, those before {total}"
            elif end > len(content):
                rest = "the file ends within this frame"
            else:
                offsets.append(at)
                at = end
    # MDAnalysis reads what it takes for the first two frames when it opens the file.
    first, is_packed = np.array(offsets[:2], np.int64), path.suffix.lower() == ".xtc" and total > 9
    if (len(first) < 2 and rest is not None) or (is_packed and _xtc_overflows(path, first, total)):
        raise DataError(f"{path} cannot be read as a trajectory: {rest or 'its first frames are damaged'}; restore it")
    return Frames(path, len(offsets), rest, np.array(offsets, np.int64))


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


_FRAME_ENDS: Final = {".xtc": _xtc_end, ".trr": _trr_end}


def _xtc_overflows(path: Path, offsets: NDArray[np.int64], atoms: int) -> list[int]:
    """Which of these frames would unpack to more atoms than there are, or need more bytes than they have.

    A frame is groups: one atom in `wide` bits, a flag, 5 bits if it is set, and the atoms that follow in `small` bits each; the 5
    bits tell how many these are from now on, and change `small`. All frames are gone through at once, group by group.
    """
    heads, contents = [], []
    with path.open("rb") as file:
        for at in offsets.tolist():
            file.seek(at + 60)
            *bounds, small, size = struct.unpack(">8i", file.read(32))
            spans = [high - low + 1 for low, high in zip(bounds[:3], bounds[3:], strict=True)]
            wide = math.prod(spans).bit_length() if max(spans) <= 0xFFFFFF else sum(min(span.bit_length(), 32) for span in spans)
            heads.append((wide, small, size))
            contents.append(file.read(size))
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


def _opened(path: Path, total: int | None, offsets: NDArray[np.int64] | None) -> Any:
    """A reader of this file, made in steps because of two habits of MDAnalysis.

    A reader that fails to open complains once more when it is collected, unless it has something to close. And those of XTC and TRR
    write the places of their frames, and a lock, beside the user's file; here they are kept by who asked for them.
    """
    from MDAnalysis.core._get_readers import get_reader_for

    kind = get_reader_for(str(path))
    reader = kind.__new__(kind)
    reader._auxs, reader.close = {}, lambda: None
    reader._load_offsets = lambda: None if offsets is None else reader._xdr.set_offsets(offsets)
    try:
        reader.__init__(str(path), **({} if total is None else {"n_atoms": total}))
    except _ERRORS:
        with suppress(*_ERRORS):
            kind.close(reader)
        raise
    del reader.close, reader._load_offsets
    if offsets is not None:

        def read_frame(frame: int) -> Any:
            reader._frame = frame - 1
            reader._xdr.seek(frame)
            return reader._read_next_timestep()

        reader._read_frame = read_frame  # its own would look for all frames again after each that is damaged
    return reader


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise DataError(f"there is no {what} {path}; correct the name")
    if path.stat().st_size == 0:
        raise DataError(f"the {what} {path} is empty (0 bytes); restore it")


def _short(error: BaseException) -> str:
    """The first line of an error: some list all formats."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep MDAnalysis's warnings (guessed masses, no unit cell, its own deprecations) from the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
