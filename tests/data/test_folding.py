"""The protein-folding dataset: a sound native structure, right forces, folding and melting, frames that come out again."""

import json
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deepex.data.simulation import folding, protein
from deepex.data.simulation.folding import TEMPERATURE, FoldingMaps, native_fraction, simulate
from deepex.errors import DataError, StorageError

NATIVE_MAP = (protein.distances(protein.NATIVE) < 8)[np.newaxis, :, :, np.newaxis].astype(np.uint8)


class ShortMaps(FoldingMaps):
    """Trajectories of 6 frames: two of them cost a second."""

    block = 6


def read(images: FoldingMaps, numbers: list[int]) -> np.ndarray:
    out = np.full((len(numbers), *images.shape), 7, images.dtype)
    assert images.read(np.array(numbers), out) == []
    return out


@pytest.fixture(scope="module")
def fifteen() -> np.ndarray:
    return read(ShortMaps(15, seed=3, part="train"), list(range(15)))


def context(integrator: Any) -> Any:
    import openmm

    made = openmm.Context(protein.build_system(), integrator, openmm.Platform.getPlatformByName("Reference"))
    made.setPositions(protein.NATIVE / 10)
    return made


def potential(made: Any, groups: int = -1) -> float:
    from openmm.unit import kilojoule_per_mole

    return float(made.getState(getEnergy=True, groups=groups).getPotentialEnergy().value_in_unit(kilojoule_per_mole))


def total(made: Any) -> float:
    from openmm.unit import kilojoule_per_mole

    return potential(made) + float(made.getState(getEnergy=True).getKineticEnergy().value_in_unit(kilojoule_per_mole))


def handedness(positions: np.ndarray) -> float:
    """Signed volume of four consecutive Cα: positive in a right-handed helix."""
    first, middle, last = np.diff(positions, axis=0)
    return float(np.cross(first, middle) @ last)


def test_native_structure_is_a_sound_hairpin_and_helix() -> None:
    apart = protein.distances(protein.NATIVE)
    assert len(protein.NATIVE) == len(protein.SEQUENCE) == 28
    np.testing.assert_allclose(np.diag(apart, 1), 3.81, atol=0.02)
    assert apart[np.triu_indices(28, 3)].min() > 4.5
    assert 9.0 < np.sqrt(((protein.NATIVE - protein.NATIVE.mean(axis=0)) ** 2).sum(axis=1).mean()) < 9.5
    pairs = set(protein.native_pairs())
    assert {(i, i + 4) for i in range(14, 22)} <= pairs  # helix
    assert {(i, 15 - i) for i in range(2, 6)} <= pairs  # strands, around the turn 8-9
    assert all(handedness(protein.NATIVE[i : i + 4]) > 0 for i in range(14, 22))
    assert [protein.SEQUENCE[i] for i in protein.CORE] == list("YAIFLFIF")
    assert any(i in protein.HAIRPIN and j in protein.HELIX for i, j in pairs)


def test_native_structure_is_where_the_force_field_wants_to_be() -> None:
    import openmm

    made = context(openmm.VerletIntegrator(0.001))
    for group in range(3):  # bonds, angles, dihedrals
        assert potential(made, 1 << group) == pytest.approx(0, abs=1e-6)
    contacts = -protein.EPSILON * sum(protein.contact_strengths().values())
    assert potential(made, 1 << 3) == pytest.approx(contacts, rel=0.01)  # the barriers reach a little into the contacts
    assert 0 < potential(made, 1 << 4) < 0.05 * -contacts


def angles(positions: np.ndarray) -> np.ndarray:
    back, ahead = positions[:-2] - positions[1:-1], positions[2:] - positions[1:-1]
    return np.arccos((back * ahead).sum(1) / np.linalg.norm(back, axis=1) / np.linalg.norm(ahead, axis=1))


def dihedrals(positions: np.ndarray) -> np.ndarray:
    """Between the planes of beads 0, 1, 2 and 1, 2, 3, and so on."""
    first, middle, last = (np.diff(positions, axis=0)[k : k + 25] for k in range(3))
    before, after = np.cross(first, middle), np.cross(middle, last)
    cosines = (before * after).sum(1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)
    return np.arccos(cosines) * np.sign((first * after).sum(1))


def test_the_energy_is_that_of_the_paper() -> None:
    """Clementi et al. 2000, in their units: 100 per Å² of a bond, 20 per rad² of an angle, 1 and 1/2 of a dihedral, a 12-10
    contact, a repulsion of 4 Å; with the barrier of Cheung et al. 2002 at 1.5 Å, and 1.5 between hairpin and helix.
    """
    import openmm

    made, native = context(openmm.VerletIntegrator(0.001)), protein.NATIVE
    positions = native + np.random.default_rng(5).normal(scale=0.4, size=(28, 3))
    made.setPositions(positions / 10)
    r, r0 = protein.distances(positions), protein.distances(native)
    twist = dihedrals(positions) - dihedrals(native)
    contacts, far = 0.0, 0.0
    for i in range(28):
        for j in range(i + 4, 28):
            if (i, j) in protein.contact_strengths():
                ratio, beyond = r0[i, j] / r[i, j], r[i, j] - r0[i, j] - 1.5
                strength = 1.5 if i < 12 and j >= 16 else 1.0
                contacts += strength * (5 * ratio**12 - 6 * ratio**10 + np.exp(-((beyond / 0.6) ** 2)))
            else:
                far += (4.0 / r[i, j]) ** 12
    bonds = 100 * ((np.diag(r, 1) - np.diag(r0, 1)) ** 2).sum()
    bends = 20 * ((angles(positions) - angles(native)) ** 2).sum()
    twists = (1 - np.cos(twist) + (1 - np.cos(3 * twist)) / 2).sum()
    found = [potential(made, 1 << group) / protein.EPSILON for group in range(5)]
    assert found == pytest.approx([bonds, bends, twists, contacts, far], rel=1e-4)


def test_forces_are_the_gradient_of_the_energy() -> None:
    import openmm
    from openmm.unit import kilojoule_per_mole, nanometer

    made = context(openmm.VerletIntegrator(0.001))
    rng = np.random.default_rng(5)
    positions = protein.NATIVE / 10 + rng.normal(scale=0.03, size=(28, 3))
    made.setPositions(positions)
    forces = made.getState(getForces=True).getForces(asNumpy=True).value_in_unit(kilojoule_per_mole / nanometer)
    for _ in range(20):
        direction = rng.normal(size=(28, 3))
        ends = []
        for sign in (1, -1):
            made.setPositions(positions + sign * 1e-6 * direction)
            ends.append(potential(made))
        assert (ends[1] - ends[0]) / 2e-6 == pytest.approx(float((forces * direction).sum()), rel=1e-6, abs=1e-3)


def test_energy_is_conserved_without_a_thermostat() -> None:
    import openmm

    integrator = openmm.VerletIntegrator(0.002)
    made = context(integrator)
    made.setVelocitiesToTemperature(TEMPERATURE, 11)
    integrator.step(100)
    start = total(made)
    drifts = []
    for _ in range(20):
        integrator.step(200)
        drifts.append(abs(total(made) - start))
    thermal = 28 * 1.5 * 0.0083145 * TEMPERATURE
    assert max(drifts) < 0.01 * thermal


def test_the_protein_is_stable_when_cold_and_melts_when_hot() -> None:
    pairs = protein.native_pairs()
    cold, hot = (simulate(25, entropy=(1,), melted=False, temperature=t) for t in (0.5 * TEMPERATURE, 2 * TEMPERATURE))
    assert native_fraction(_maps(cold), pairs).min() > 0.85
    assert native_fraction(_maps(hot), pairs)[5:].mean() < 0.3


def test_a_melted_protein_folds_when_cooled() -> None:
    def folds(entropy: int) -> bool:
        frames = simulate(200, entropy=(entropy,), melted=True, temperature=0.8 * TEMPERATURE)
        fraction = native_fraction(_maps(frames), protein.native_pairs())
        assert fraction[0] < 0.6
        return bool(np.convolve(fraction, np.full(10, 0.1), "valid").max() > 0.8)  # ten frames on end, not one by chance

    assert any(folds(entropy) for entropy in range(3))  # it may be caught half folded, but hardly three times


def _maps(positions: np.ndarray) -> np.ndarray:
    return np.stack([protein.distances(frame.astype(float)) < 8 for frame in positions])


def test_maps_are_symmetric_zeros_and_ones_that_change(fifteen: np.ndarray) -> None:
    assert fifteen.dtype == np.uint8
    assert set(np.unique(fifteen)) == {0, 1}
    np.testing.assert_array_equal(fifteen, fifteen.transpose(0, 2, 1, 3))
    near = np.abs(np.subtract.outer(np.arange(28), np.arange(28))) <= 1
    assert fifteen[:, near].all()  # itself, and the neighbours at 3.8 Å
    assert len(np.unique(fifteen, axis=0)) == 15


def test_trajectories_start_folded_and_unfolded_in_turn(fifteen: np.ndarray) -> None:
    fraction = native_fraction(fifteen, protein.native_pairs())
    assert fraction[0] > 0.6  # trajectory 0
    assert fraction[6] < 0.6  # trajectory 1
    assert fraction[12] > 0.6  # trajectory 2


@settings(max_examples=3, deadline=None)
@given(st.sets(st.integers(0, 14), min_size=1, max_size=15))
def test_any_part_reads_as_the_whole(fifteen: np.ndarray, numbers: set[int]) -> None:
    images = pickle.loads(pickle.dumps(ShortMaps(15, seed=3, part="train")))
    np.testing.assert_array_equal(read(images, sorted(numbers)), fifteen[sorted(numbers)])


def test_reading_in_threads_gives_the_same(fifteen: np.ndarray) -> None:
    images = ShortMaps(15, seed=3, part="train")
    with ThreadPoolExecutor(3) as pool:
        blocks = list(pool.map(lambda first: read(images, list(range(first, min(first + 6, 15)))), (0, 6, 12)))
    np.testing.assert_array_equal(np.concatenate(blocks), fifteen)


def test_parts_seeds_and_trajectories_differ(fifteen: np.ndarray) -> None:
    others = (ShortMaps(6, seed=3, part="validation"), ShortMaps(6, seed=4, part="train"))
    starts = [fifteen[:2], fifteen[12:14], *(read(images, [0, 1]) for images in others)]
    assert len({start.tobytes() for start in starts}) == 4


def test_each_trajectory_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise draws trajectories together, whatever their velocities were at the start."""
    import openmm

    seeds = []

    class Spy(openmm.LangevinMiddleIntegrator):
        def setRandomNumberSeed(self, seed: int) -> None:  # noqa: N802 - OpenMM's name
            seeds.append(seed)
            super().setRandomNumberSeed(seed)

    monkeypatch.setattr(openmm, "LangevinMiddleIntegrator", Spy)
    monkeypatch.setattr(folding, "SETTLING_STEPS", 10)
    for trajectory in (0, 1, 2, 0):
        simulate(1, entropy=(3, 0, trajectory), melted=False)
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3
    assert all(0 < seed < 2**31 for seed in seeds)  # OpenMM takes 0 as "any"


def test_kept_trajectories_give_the_same_maps(tmp_path: Path, fifteen: np.ndarray) -> None:
    import MDAnalysis
    from MDAnalysis.analysis.distances import contact_matrix
    from MDAnalysis.lib.util import convert_aa_code

    keep = tmp_path / "new" / "trajectories"
    images = ShortMaps(15, seed=3, part="train", keep=keep)
    np.testing.assert_array_equal(read(images, [2, 7, 12]), fifteen[[2, 7, 12]])
    names = [f"train-0000{n}.dcd" for n in range(3)]
    assert sorted(entry.name for entry in keep.iterdir()) == ["topology.pdb", *names]  # nothing half-written
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MDAnalysis announces changes of its own, and misses masses in a PDB file
        universe = MDAnalysis.Universe(str(keep / "topology.pdb"), [str(keep / name) for name in names])
        kept = np.stack([contact_matrix(step.positions, cutoff=8.0) for step in universe.trajectory])
        single = MDAnalysis.Universe(str(keep / "topology.pdb"), str(keep / names[0]))
        assert single.trajectory.dt == pytest.approx(400 * 0.015, rel=1e-4)
    np.testing.assert_array_equal(kept[..., np.newaxis], fifteen)
    assert list(universe.atoms.names) == ["CA"] * 28
    letters = [convert_aa_code(name) for name in universe.residues.resnames]
    assert "".join(letters) == protein.SEQUENCE


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        read(ShortMaps(1, seed=0, part="train", keep=tmp_path / "file"), [0])


def test_description_says_all_and_is_plain() -> None:
    images = FoldingMaps(5000, seed=8, part="validation")
    described = json.loads(json.dumps(images.description))
    assert described == images.description
    assert native_fraction(NATIVE_MAP, described["native_pairs"]) == pytest.approx([1.0])
    assert described["temperature_k"] == TEMPERATURE
    assert described["sequence"] == protein.SEQUENCE
    assert images.name(4001) == "validation-00002, frame 1"
    assert (images.labels, images.busy, images.count) == (None, True, 5000)


@given(arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(28), st.just(28), st.just(1)), elements=st.integers(0, 1)))
def test_native_fraction_counts_native_pairs(maps: np.ndarray) -> None:
    pairs = protein.native_pairs()
    expected = [sum(int(one[i, j, 0]) for i, j in pairs) / len(pairs) for one in maps]
    np.testing.assert_allclose(native_fraction(maps, pairs), expected)
    np.testing.assert_allclose(native_fraction(maps[..., 0], pairs), expected)


@pytest.mark.parametrize("module", ["openmm", "MDAnalysis.lib.distances"])
def test_a_missing_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"pip install 'deepex\[science\]'"):
        FoldingMaps(1, seed=0, part="train")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"count": 0, "seed": 0, "part": "train"}, "at least 1"),
        ({"count": 1, "seed": -1, "part": "train"}, "not be negative"),
        ({"count": 1, "seed": 0, "part": "test"}, "train or validation"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        FoldingMaps(**arguments)
