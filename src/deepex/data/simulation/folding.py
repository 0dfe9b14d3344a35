"""The protein-folding dataset: contact maps of a 28-residue protein that folds and unfolds, from molecular dynamics.

    images = FoldingMaps(1_000_000, seed=1, part="train", keep=Path("trajectories"))
    out = np.empty((images.block, *images.shape), images.dtype)
    images.read(np.arange(images.block), out)                     # one trajectory: 14 s on one free core
    q = native_fraction(out, images.description["native_pairs"])  # near 0.85 folded, near 0.25 unfolded

Every `block` samples are one trajectory with its own random numbers, drawn from seed, part and its place, so that any process can
make any of them, in any order. Trajectories start folded and unfolded in turn. They run at the folding temperature, where the
protein changes state several times in each. The same frames come out again on the same kind of machine with the same OpenMM;
elsewhere rounding differs and, the motion being chaotic, so do the frames, but not their statistics.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from deepex.data.simulation import protein
from deepex.data.simulation.request import PartName, Request
from deepex.data.source.base import Bad, Images
from deepex.errors import DataError
from deepex.record.files import storage_error, write_atomic

TEMPERATURE = 325.0  # K
FRICTION = 1.0  # per ps
TIME_STEP = 0.015  # ps, a tenth of the fastest vibration
STEPS = 400  # between two frames, in which 13 (folded) to 20 (unfolded) of the 378 pairs of residues change
FRAMES = 2_000  # of a trajectory
MELTING = 3.0  # times TEMPERATURE, for what starts unfolded
MELTING_STEPS = 20_000
SETTLING_STEPS = 10_000  # at TEMPERATURE, before the first frame
# For 28 beads on one core Reference makes over three times the steps/s of the CPU platform with one thread (64,000 against 20,000).
PLATFORM = "Reference"

# OpenMM's Reference platform has one random generator for the whole process: two trajectories at a time would share its numbers.
_ONE_AT_A_TIME = threading.Lock()


class FoldingMaps(Images):
    """Contact maps (28, 28, 1) of 0 and 1: Cα atoms nearer than 8 Å, frame by frame, `FRAMES` of each trajectory.

    `keep` is a directory that gets each trajectory as PART-NUMBER.dcd, and topology.pdb for all of them; reading any sample of a
    trajectory then makes it whole.
    """

    shape = (len(protein.SEQUENCE), len(protein.SEQUENCE), 1)
    dtype = np.dtype(np.uint8)
    block = FRAMES
    busy = True

    def __init__(self, count: int, *, seed: int, part: PartName, keep: Path | None = None) -> None:
        self._request = Request(count=count, seed=seed, part=part)
        openmm = protein.require_openmm()
        _require_distance_array()
        self.count, self.keep = count, keep
        self.description = _describe(openmm) | {"seed": seed, "part": part}

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        """Simulate the trajectories of these frames, each as far as it is needed, and write the maps into `out`."""
        trajectories = numbers // self.block
        for trajectory in np.unique(trajectories):
            rows = np.flatnonzero(trajectories == trajectory)
            frames = numbers[rows] % self.block
            positions = self._positions(int(trajectory), int(frames[-1]) + 1)
            out[rows] = contact_maps(positions[frames])
        return []

    def name(self, number: int) -> str:
        """Name the trajectory and the frame."""
        return f"{self._trajectory_name(number // self.block)}, frame {number % self.block}"

    def _positions(self, trajectory: int, most: int) -> NDArray[np.float32]:
        """At least the first `most` frames (frame, bead, 3) of a trajectory in Å, all of them if they are kept."""
        if self.keep is not None:
            most = min(self.block, self.count - trajectory * self.block)
        with _ONE_AT_A_TIME:
            frames = simulate(most, entropy=self._request.entropy(trajectory), melted=trajectory % 2 == 1)
        if self.keep is not None:
            _keep(self.keep, self._trajectory_name(trajectory), frames)
        return frames

    def _trajectory_name(self, trajectory: int) -> str:
        return f"{self._request.part}-{trajectory:05d}"


def native_fraction(maps: NDArray[Any], pairs: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Q: the fraction of these native contacts that each map (n, 28, 28) or (n, 28, 28, 1) has; 1 is the native structure."""
    flat = maps.reshape(*maps.shape[:3])
    first, second = np.asarray(pairs).T
    found: NDArray[np.float64] = (flat[:, first, second] != 0).mean(axis=1)
    return found


def contact_maps(positions: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The contact map (28, 28, 1) of each frame; positions in Å."""
    distance_array = _require_distance_array()
    size = positions.shape[1]
    maps = np.empty((len(positions), size, size, 1), np.uint8)
    apart = np.empty((size, size))
    for frame, one in zip(maps, positions, strict=True):
        distance_array(one, one, result=apart)
        frame[..., 0] = apart < protein.CUTOFF
    return maps


def simulate(frames: int, *, entropy: Sequence[int], melted: bool, temperature: float = TEMPERATURE) -> NDArray[np.float32]:
    """Run one trajectory and return its frames (frame, bead, 3) in Å; a longer run with the same entropy begins with the same."""
    openmm = protein.require_openmm()
    # 31 bits, and never 0, which OpenMM takes as "any".
    noise, velocities = (int(word >> 1) | 1 for word in np.random.SeedSequence(entropy).generate_state(2))
    integrator = openmm.LangevinMiddleIntegrator(temperature * (MELTING if melted else 1.0), FRICTION, TIME_STEP)
    integrator.setRandomNumberSeed(noise)
    context = openmm.Context(protein.build_system(), integrator, openmm.Platform.getPlatformByName(PLATFORM))
    context.setPositions(protein.NATIVE / 10)
    context.setVelocitiesToTemperature(integrator.getTemperature(), velocities)
    if melted:
        integrator.step(MELTING_STEPS)
        integrator.setTemperature(temperature)
    integrator.step(SETTLING_STEPS)
    out = np.empty((frames, len(protein.SEQUENCE), 3), np.float32)
    for place, positions in zip(out, _run(context, integrator), strict=False):
        place[:] = positions
    return out


def _run(context: Any, integrator: Any) -> Iterator[NDArray[np.float64]]:
    from openmm.unit import angstrom

    while True:
        integrator.step(STEPS)
        yield context.getState(getPositions=True).getPositions(asNumpy=True).value_in_unit(angstrom)


def _require_distance_array() -> Any:
    try:
        from MDAnalysis.lib.distances import distance_array
    except ImportError as error:
        raise DataError(f"contact maps need MDAnalysis ({error}); pip install 'deepex[science]'") from error
    return distance_array


def _keep(directory: Path, name: str, frames: NDArray[np.float32]) -> None:
    from MDAnalysis.lib.formats.libdcd import DCDFile
    from MDAnalysis.units import convert

    def write(temporary: Path) -> None:
        with DCDFile(str(temporary), "w") as file:
            file.write_header(
                remarks="Calpha model of FSD-1",
                natoms=frames.shape[1],
                istart=0,
                nsavc=STEPS,
                delta=convert(TIME_STEP, "ps", "AKMA"),
                is_periodic=False,
            )
            for frame in frames:
                file.write(xyz=frame, box=np.zeros(6))

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(directory, error) from error
    _keep_topology(directory / "topology.pdb")
    write_atomic(directory / f"{name}.dcd", write)


def _keep_topology(path: Path) -> None:
    """Write the PDB file, unless it is there; under a name of its own first, for every process may be doing this now."""
    if path.exists():
        return
    from openmm.app import PDBFile
    from openmm.unit import angstrom

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="ascii") as file:
            PDBFile.writeFile(protein.build_topology(), protein.NATIVE * angstrom, file)

    own = path.with_name(f".{uuid4().hex}.pdb")
    write_atomic(own, write)
    own.replace(path)


def _describe(openmm: Any) -> dict[str, Any]:
    return {
        "simulation": "molecular dynamics of a protein that folds and unfolds",
        "model": "structure-based C-alpha model (Clementi et al. 2000), 12-10 contacts with desolvation barrier",
        "structure": "idealised beta-beta-alpha fold of FSD-1 (not PDB coordinates)",
        "sequence": protein.SEQUENCE,
        "energy_unit_kj_per_mol": protein.EPSILON,
        "temperature_k": TEMPERATURE,
        "friction_per_ps": FRICTION,
        "time_step_fs": 1000 * TIME_STEP,
        "steps_between_frames": STEPS,
        "frames_per_trajectory": FRAMES,
        "starts": "folded and unfolded in turn",
        "cutoff_angstrom": protein.CUTOFF,
        "platform": f"OpenMM {openmm.__version__} {PLATFORM}",
        "native_pairs": [list(pair) for pair in protein.native_pairs()],  # residues numbered from 0, as in the maps
    }
