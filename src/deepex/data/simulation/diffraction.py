"""The AtomAI benchmark: convergent-beam electron diffraction patterns of 27 crystals, simulated by multislice (abTEM).

    images = DiffractionPatterns(24_300, seed=0, part="train")
    out = np.empty((10, *images.shape), images.dtype)
    images.read(np.arange(10), out)                  # the 10 patterns of specimen 0

Which crystal it is must be seen in how the discs lie and what is inside them; what an experiment does not hold still is drawn at
random: `NUISANCES`. A specimen is a slab with its own rotation, mis-tilt, thermal displacements and detector blur; 10 patterns are
taken of it, each with its own probe position, thickness, defocus, dose and shift.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepex.data.simulation import multislice
from deepex.data.simulation.crystals import CRYSTALS, Orientation, slab
from deepex.data.simulation.multislice import Engine, Shot, expected_patterns
from deepex.data.simulation.request import PartName, Request
from deepex.data.source.base import Bad, Images

CLASSES: tuple[str, ...] = tuple(crystal.name for crystal in CRYSTALS)
_LEVELS = 4.0  # grey levels per square root of counts: the noise of any bright pixel is then 2 levels


@dataclass(frozen=True, kw_only=True)
class Nuisance:
    """A quantity drawn anew `per` specimen or pattern, from `low` to `high`, evenly or (`logarithmic`) in its logarithm."""

    low: float
    high: float
    unit: str
    per: Literal["specimen", "pattern"]
    meaning: str
    logarithmic: bool = False

    def draw(self, rng: np.random.Generator, *size: int) -> Any:
        """Draw one value, or an array of `size`."""
        if self.logarithmic:
            return np.exp(rng.uniform(np.log(self.low), np.log(self.high), size or None))
        return rng.uniform(self.low, self.high, size or None)


NUISANCES: dict[str, Nuisance] = {
    "rotation": Nuisance(low=-180.0, high=180.0, unit="degree", per="specimen", meaning="of the crystal about the beam"),
    "tilt": Nuisance(low=0.0, high=10.0, unit="mrad", per="specimen", meaning="of the zone axis off the beam, in any direction"),
    "displacement": Nuisance(
        low=0.05, high=0.10, unit="Å", per="specimen", meaning="thermal, rms per atom and axis, one frozen phonon"
    ),
    "blur": Nuisance(low=0.4, high=0.8, unit="pixel", per="specimen", meaning="rms of the detector's Gaussian point spread"),
    "position": Nuisance(low=-3.0, high=3.0, unit="Å", per="pattern", meaning="of the probe, along both axes"),
    "thickness": Nuisance(low=24.0, high=100.0, unit="Å", per="pattern", meaning="in steps of 4 Å"),
    "defocus": Nuisance(low=-150.0, high=150.0, unit="Å", per="pattern", meaning="of the probe at the entrance surface"),
    "shift": Nuisance(low=-7.0, high=7.0, unit="pixel", per="pattern", meaning="of the pattern's centre, along both axes"),
    "dose": Nuisance(
        low=1e5, high=5e5, unit="electron", per="pattern", meaning="in the beam; counts are Poisson", logarithmic=True
    ),
}


class DiffractionPatterns(Images):
    """`count` patterns, (120, 85, 1) uint8, 10 of each specimen; specimen s is of class s mod 27.

    Pattern n depends on (seed, part, n) alone, not on `count` or on what else is read; the two parts have no specimen in common.
    Equal bits are promised on machines of one kind with the same versions of abTEM, FFTW and numpy. With `engine` "gpu"
    abTEM computes with CuPy, to rounding the same; its FFTs differ in the last bits, and so do a few counts. The fields are too
    small for a large GPU: 16 processes that share one H200 are slower than on the 16 cores beside it, so "cpu" is the default.
    The tests have no CuPy: the GPU path was compared by hand, on one H200, where 99.5 % of the pixels were those of the CPU.
    """

    shape = (multislice.HEIGHT, multislice.WIDTH, 1)
    dtype = np.dtype(np.uint8)
    block = 10
    busy = True

    def __init__(self, count: int, *, seed: int, part: PartName, engine: Engine = "cpu") -> None:
        self._request = Request(count=count, seed=seed, part=part)
        self.count = count
        multislice.check_engine(engine)
        self.device = engine
        self.labels = np.arange(count, dtype=np.int64) // self.block % len(CRYSTALS)
        self.description = self._describe()

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        """Simulate each specimen that any of these patterns is of, whole; nothing can be bad."""
        specimens = numbers // self.block
        for specimen in np.unique(specimens):
            rows = np.flatnonzero(specimens == specimen)
            out[rows, :, :, 0] = self._expose(int(specimen))[numbers[rows] % self.block]
        return []

    def name(self, number: int) -> str:
        """Name the pattern, its specimen and its class."""
        specimen, place = divmod(number, self.block)
        return f"pattern {place} of {self._request.part} specimen {specimen} ({CLASSES[specimen % len(CLASSES)]})"

    def _expose(self, specimen: int) -> NDArray[np.uint8]:
        from scipy.ndimage import gaussian_filter

        # The order of the draws is part of the dataset: a change of it makes other patterns of the same seed.
        rng = np.random.default_rng(self._request.entropy(specimen))
        orientation, displacement = _orient(rng), NUISANCES["displacement"].draw(rng)
        blur, shots = NUISANCES["blur"].draw(rng), _shoot(rng, self.block)
        doses = NUISANCES["dose"].draw(rng, self.block)
        box = (multislice.EXTENT, multislice.EXTENT, multislice.SLICE * max(shot.slices for shot in shots))
        atoms = slab(CRYSTALS[specimen % len(CRYSTALS)], box, orientation=orientation, displacement=displacement, rng=rng)
        fractions = gaussian_filter(expected_patterns(atoms, shots, self.device), (0.0, blur, blur), mode="constant")
        return to_grey(rng.poisson(fractions * doses[:, None, None]))

    def _describe(self) -> dict[str, Any]:
        return {
            "simulation": f"convergent-beam electron diffraction by multislice, abTEM {multislice.load_abtem().__version__}",
            "seed": self._request.seed,
            "part": self._request.part,
            "engine": self.device,
            "energy_ev": multislice.ENERGY,
            "semiangle_mrad": multislice.SEMIANGLE,
            "pixel_per_angstrom": multislice.PIXEL,
            "grey": f"round({_LEVELS:g} * sqrt(counts)), at most 255",
            "patterns_per_specimen": self.block,
            "nuisances": {name: asdict(nuisance) for name, nuisance in NUISANCES.items()},
        }


def to_grey(counts: NDArray[Any]) -> NDArray[np.uint8]:
    """Map counts to grey levels by one fixed square root, which makes the noise of all levels alike."""
    return np.asarray(np.minimum(np.rint(_LEVELS * np.sqrt(counts)), 255.0), np.uint8)


def _orient(rng: np.random.Generator) -> Orientation:
    rotation, direction = np.deg2rad(NUISANCES["rotation"].draw(rng)), rng.uniform(0.0, 2.0 * np.pi)
    tilt = NUISANCES["tilt"].draw(rng) / 1000.0
    return Orientation(rotation=rotation, tilt=(tilt * np.cos(direction), tilt * np.sin(direction)))


def _shoot(rng: np.random.Generator, num_shots: int) -> list[Shot]:
    positions, shifts = (NUISANCES[name].draw(rng, num_shots, 2).tolist() for name in ("position", "shift"))
    thicknesses, foci = (NUISANCES[name].draw(rng, num_shots) for name in ("thickness", "defocus"))
    return [
        Shot(slices=round(thickness / multislice.SLICE), defocus=defocus, position=tuple(position), shift=tuple(shift))
        for thickness, defocus, position, shift in zip(thicknesses, foci.tolist(), positions, shifts, strict=True)
    ]
