"""One convergent electron beam through thin slabs: multislice by abTEM, from atoms to what a detector expects per electron.

    atoms = slab(CRYSTALS[0], (EXTENT, EXTENT, 100.0))
    fractions = expected_patterns(atoms, [Shot(slices=25), Shot(slices=10, defocus=100.0)])  # (2, 120, 85), sums ≤ 1

The probe is narrow against the box, so that the crystal need not be periodic in it: any rotation and tilt is exact. The detector's
pixels are finer than the box resolves by itself: the exit wave, which is next to nothing at the rim of the box, is padded by zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

Engine = Literal["cpu", "gpu"]

ENERGY = 100e3  # eV
SEMIANGLE = 8.0  # mrad: discs of most crystals overlap, of those with the shortest lattice they stand apart
EXTENT = 40.0  # Å, the box across the beam
SLICE = 4.0  # Å along the beam
HEIGHT, WIDTH = 120, 85
_GRID = 128  # a power of two: FFTW needs 0.035 ms for it, 0.09 ms for 144². Its band limit is 2/3 · 64 of its own pixels …
_PADDED = 180  # … and 60 of the detector's: half its height
PIXEL = _GRID / (_PADDED * EXTENT)  # 1/Å
CENTRE = (HEIGHT // 2, WIDTH // 2)  # where the beam arrives at a shift of zero


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One exposure: slices crossed, defocus (Å), probe position (Å from the centre of the box), shift of the pattern (pixels)."""

    slices: int
    defocus: float = 0.0
    position: tuple[float, float] = (0.0, 0.0)
    shift: tuple[float, float] = (0.0, 0.0)


def check_engine(engine: Engine) -> None:
    """Refuse where abTEM cannot compute."""
    load_abtem()
    if engine not in get_args(Engine):
        raise DataError(f"engine is {engine!r}; it is one of {', '.join(get_args(Engine))}")
    trouble = _cupy_trouble() if engine == "gpu" else None
    if trouble:
        raise DataError(f"engine is 'gpu', but {trouble}; use engine 'cpu', or install CuPy for your CUDA on a machine with a GPU")


def load_abtem() -> Any:
    """Import abTEM, or say how to get it."""
    try:
        return import_module("abtem")
    except ImportError as error:
        raise DataError(
            f"electron diffraction is simulated by abTEM, which does not import ({error}): pip install 'deepex[science]'"
        ) from error


def expected_patterns(atoms: Any, shots: Sequence[Shot], device: Engine = "cpu") -> NDArray[np.float32]:
    """Compute the share of the beam's electrons that each detector pixel gets, (shots, 120, 85), without noise."""
    abtem = load_abtem()
    planes = sorted({shot.slices - 1 for shot in shots})
    with _quiet(abtem):
        potential = abtem.Potential(atoms, gpts=_GRID, slice_thickness=SLICE, exit_planes=tuple(planes), device=device)
        incident = abtem.stack([_probe(abtem, shot, device) for shot in shots], axis_metadata=[str(n) for n in range(len(shots))])
        exits = incident.multislice(potential)
    waves = _on_host(exits.array).reshape(len(planes), len(shots), _GRID, _GRID)  # abTEM has no axis for a single exit plane
    chosen = waves[[planes.index(shot.slices - 1) for shot in shots], np.arange(len(shots))]
    electrons = np.square(np.abs(_on_host(incident.array))).sum(axis=(1, 2), keepdims=True)
    return np.asarray(_diffract(chosen * _ramps(shots)) / electrons)


def _probe(abtem: Any, shot: Shot, device: str) -> Any:
    optics = abtem.Probe(energy=ENERGY, semiangle_cutoff=SEMIANGLE, defocus=shot.defocus, gpts=_GRID, extent=EXTENT, device=device)
    return optics.build(scan=(EXTENT / 2 + shot.position[0], EXTENT / 2 + shot.position[1]), lazy=False)


def _ramps(shots: Sequence[Shot]) -> NDArray[np.complex64]:
    """Give the phase that shifts each pattern by fractions of a pixel without interpolation: a tilt of the exit wave."""
    turns = np.array([shot.shift for shot in shots])[:, :, None] * np.arange(_GRID) / _PADDED
    rows, columns = np.exp(2j * np.pi * turns).astype(np.complex64).transpose(1, 0, 2)
    return np.asarray(rows[:, :, None] * columns[:, None, :])


def _diffract(waves: NDArray[np.complex64]) -> NDArray[np.float32]:
    """Give |FFT|² of the zero-padded waves around its centre, by Parseval in units of the waves' own squares."""
    from scipy.fft import fft2, fftshift

    power = np.square(np.abs(fftshift(fft2(waves, (_PADDED, _PADDED)), axes=(1, 2)))) / np.float32(_PADDED**2)
    top, left = _PADDED // 2 - CENTRE[0], _PADDED // 2 - CENTRE[1]
    return np.asarray(power[:, top : top + HEIGHT, left : left + WIDTH])


@contextmanager
def _quiet(abtem: Any) -> Iterator[None]:
    """Compute at once, in this thread, without a progress bar; FFTs are planned without timing them, so that bits do not vary."""
    import dask

    settings = {"dask.lazy": False, "diagnostics.progress_bar": False, "fftw.threads": 1, "fftw.planning_effort": "FFTW_ESTIMATE"}
    with abtem.config.set({**settings, "precision": "float32", "fft": "fftw"}), dask.config.set(scheduler="synchronous"):
        yield


def _on_host(array: Any) -> NDArray[Any]:
    return np.asarray(array.get() if hasattr(array, "get") else array)  # CuPy's way


def _cupy_trouble() -> str | None:
    try:
        num_devices = import_module("cupy").cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - a missing driver raises CuPy's own errors
        return f"CuPy cannot be used ({error})"
    return None if num_devices else "CuPy sees no GPU"
