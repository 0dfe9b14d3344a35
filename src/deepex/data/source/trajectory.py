"""Trajectories of molecular dynamics as contact maps: which of the chosen atoms are nearer to each other than a cut-off.

>>> source = open_trajectory(Path("bba.pdb"), [Path("run-1.dcd"), Path("run-2.dcd")], select="name CA", cutoff=8.0)
>>> source.train.count, source.train.shape                    # frames, (atoms, atoms, 1)
(100000, (28, 28, 1))

Any format that MDAnalysis reads will do. The atoms are chosen once, in the first frame; an atom is in contact with itself.
XTC and TRR files are looked through before MDAnalysis reads them: see `gromacs.py`.
"""

import math
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
from typing_extensions import override

from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.gromacs import SUFFIXES, scan, xtc_overflows
from deepex.errors import DataError

_BLOCK: Final = 1000
_FORMATS: Final = {".lammpstrj": "LAMMPSDUMP", ".netcdf": "NCDF"}  # usual names that MDAnalysis does not know
_MOST_WALKED: Final = 1000  # atoms up to which the looking through of XTC frames costs less than their decoding
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

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
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

    @override
    def name(self, number: int) -> str:
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
            wrong = xtc_overflows(path, offsets[frames[frames < whole]], self._total)
            bad |= dict.fromkeys(wrong, "its compressed coordinates are damaged; leave the frame out, or restore the file")
        return bad

    def _read_series(self, file: int, frames: NDArray[np.int64], places: NDArray[Any]) -> bool:
        """Read evenly spaced frames in one go, several times as fast; False if that is not possible.

        Only by readers with a way of their own: the common one takes an error for the end, and leaves the rest undefined.
        """
        if self._pbc or len(frames) < _SERIES:
            return False
        try:
            reader = self._reader(file)
            if "timeseries" not in vars(type(reader)):
                return False
            bounds = {"start": int(frames[0]), "stop": int(frames[-1]) + 1, "step": self._stride}
            places[:] = reader.timeseries(atomgroup=self._atoms, order="fac", **bounds)
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
        return box.copy()  # the reader writes the next frame's box into the same array

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
    validation: Sequence[Path] = (),
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
    files, held = ([_frames(path, topology, total) for path in paths] for paths in (trajectories, validation))
    atoms = _select(universe, topology, select, files[0])
    parts = [TrajectoryImages(part, atoms, total, cutoff=cutoff, stride=stride, pbc=pbc) for part in (files, held) if part]
    for part in parts:
        part.description |= {"topology": topology.name, "select": select, "periodic": pbc, "atoms": len(atoms)}
    return Source(train=parts[0], validation=parts[1] if held else None)


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
        if path.suffix.lower() in SUFFIXES:
            atoms, offsets, rest = scan(path, total)
            whole = len(offsets)
        else:
            with _quiet():
                reader = _opened(path, total, None)
                atoms, whole, rest, offsets = int(reader.n_atoms), int(reader.n_frames), _rest(reader, path), None
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
    return Frames(path, whole, rest, offsets)


def _mismatch(path: Path, atoms: int, topology: Path, total: int) -> DataError:
    return DataError(f"{path} has {atoms} atoms, {topology} has {total}; give the topology that the trajectory was made with")


def _rest(reader: Any, path: Path) -> str | None:
    """What the readers of DCD and XYZ pass over silently: bytes behind the last whole frame."""
    if reader.format == "DCD" and hasattr(reader._file, "_framesize"):
        later = path.stat().st_size - reader._file._header_size - reader._file._firstframesize
        is_cut = bool(later % reader._file._framesize)
    elif reader.format == "XYZ" and hasattr(reader, "_offsets"):
        is_cut = _has_text(path, reader._offsets[reader.n_frames :])
    else:
        return None
    return "the file ends within this frame" if is_cut else None


def _has_text(path: Path, offsets: Sequence[int]) -> bool:
    """Whether anything but blank lines stands from the first of these offsets on."""
    from MDAnalysis.lib.util import anyopen

    if not offsets:
        return False
    with anyopen(path) as file:
        file.seek(offsets[0])
        return any(line.strip() for line in file)


def _opened(path: Path, total: int | None, offsets: NDArray[np.int64] | None) -> Any:
    """A reader of this file, made in steps because of two habits of MDAnalysis.

    A reader that fails to open complains once more when it is collected, unless it has something to close. And those of XTC and TRR
    write the places of their frames, and a lock, beside the user's file; here they are kept by who asked for them.
    """
    from MDAnalysis.core._get_readers import get_reader_for

    kind = get_reader_for(str(path), format=_FORMATS.get(path.suffix.lower()))
    reader = kind.__new__(kind)
    reader._auxs = {}
    reader._load_offsets = lambda: None if offsets is None else reader._xdr.set_offsets(offsets)
    try:
        reader.__init__(str(path), **({} if total is None else {"n_atoms": total}))
    except _ERRORS:
        with suppress(*_ERRORS):
            kind.close(reader)
        reader.close = lambda: None
        raise
    del reader._load_offsets
    if offsets is not None:

        def read_frame(frame: int) -> Any:
            reader._frame = frame - 1
            reader._xdr.seek(frame)
            return reader._read_next_timestep()

        reader._read_frame = read_frame  # its own would look for all frames again after each that is damaged
    return reader


def _check_file(path: Path, what: str) -> None:
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode(errors="backslashreplace")
        raise DataError(f"the name of the {what} {name} is not UTF-8, and MDAnalysis opens no such file; rename it") from None
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
