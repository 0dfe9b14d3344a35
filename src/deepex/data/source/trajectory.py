"""Trajectories of molecular dynamics as contact maps: which of the chosen atoms are nearer to each other than a cut-off.

>>> source = open_trajectory(Path("bba.pdb"), [Path("run-1.dcd"), Path("run-2.dcd")], select="name CA", cutoff=8.0)
>>> source.train.count, source.train.shape                    # frames, (atoms, atoms, 1)
(100000, (28, 28, 1))

Any format that MDAnalysis reads will do. The atoms are chosen once, in the first frame; an atom is in contact with itself.
"""

import math
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import Bad, Images, Source
from deepex.errors import DataError

_BLOCK: Final = 1000
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
    """A trajectory file: its whole frames, whether it ends within one more, and where they begin (XTC, TRR)."""

    path: Path
    whole: int
    is_cut: bool
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
        self._starts = np.cumsum([0, *(-(-(file.whole + file.is_cut) // stride) for file in files)])
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
        bad: dict[int, str] = {}
        for run in np.split(np.arange(len(frames)), np.flatnonzero(np.diff(frames) != self._stride) + 1):
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
        if any(box is None for box in boxes):
            contacts(places, self._cutoff, out)
        for row, box in enumerate(boxes):
            if box is not None and row not in bad:
                _periodic_contacts(places[row], box, self._cutoff, out[row])
        return bad

    def _read_series(self, file: int, frames: NDArray[np.int64], places: NDArray[Any]) -> bool:
        """Read evenly spaced frames in one go, several times as fast; False if that is not possible."""
        if self._pbc or len(frames) < _SERIES or frames[-1] >= self._files[file].whole:
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
        if frame >= self._files[file].whole:
            raise EOFError("the file ends within this frame")
        step = self._reader(file)[frame]
        places[:] = step.positions[self._atoms.indices]
        box: NDArray[Any] | None = step.dimensions if self._pbc else None
        if box is not None and (not np.isfinite(box).all() or (box <= 0).any()):
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
    atoms = _select(universe, topology, select, trajectories[0])
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


def _select(universe: Any, topology: Path, select: str, trajectory: Path) -> NDArray[np.int64]:
    try:
        with _quiet():
            universe.trajectory = _opened(trajectory, len(universe.atoms), None)  # "around 5 protein" asks for coordinates
            atoms = universe.select_atoms(select).ix.astype(np.int64)
            universe.trajectory.close()
    except _ERRORS as error:
        raise DataError(
            f"the selection {select!r} cannot be made in {topology}: {_short(error)}; write it as for MDAnalysis"
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
        with _quiet():
            reader = _opened(path, total, None)
            atoms, whole = int(reader.n_atoms), int(reader.n_frames)
            offsets = getattr(getattr(reader, "_xdr", None), "offsets", None)
            is_cut = _is_cut(reader, path)
            reader.close()
    except _ERRORS as error:
        raise DataError(f"{path} cannot be read as a trajectory: {_short(error)}; restore it, or give another kind") from error
    if atoms != total:
        raise DataError(f"{path} has {atoms} atoms, {topology} has {total}; give the topology that the trajectory was made with")
    if whole < 1:
        raise DataError(f"{path} has no whole frame; leave it out")
    return Frames(path, whole, is_cut, offsets)


def _is_cut(reader: Any, path: Path) -> bool:
    """Whether bytes are left behind the last whole frame, which the readers of DCD, XTC and TRR pass over silently."""
    size = path.stat().st_size
    if reader.format == "DCD" and hasattr(reader._file, "_framesize"):
        return bool((size - reader._file._header_size - reader._file._firstframesize) % reader._file._framesize)
    if hasattr(reader, "_xdr"):
        try:
            reader._xdr.seek(reader.n_frames - 1)
            reader._xdr.read()
        except OSError:  # within the last frame, which is counted: told when it is read
            return False
        return bool(reader._xdr._bytes_tell() != size)
    return False


def _opened(path: Path, total: int, offsets: NDArray[np.int64] | None) -> Any:
    """A reader of this file, made in steps because of two habits of MDAnalysis.

    A reader that fails to open complains once more when it is collected, unless it has something to close. And those of XTC and TRR
    write the places of their frames, and a lock, beside the user's file; here they are kept by who asked for them.
    """
    from MDAnalysis.core._get_readers import get_reader_for

    kind = get_reader_for(str(path))
    reader = kind.__new__(kind)
    reader._auxs, reader.close = {}, lambda: None
    reader._load_offsets = lambda: None if offsets is None else reader._xdr.set_offsets(offsets)
    reader._read_offsets = lambda store=False: None  # noqa: ARG005 - called by name
    reader.__init__(str(path), n_atoms=total)
    del reader.close, reader._load_offsets  # the latter would keep the reader alive
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
