import json
import lzma
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from ase.data import atomic_numbers, reference_states
from ase.neighborlist import neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.data.simulation import diffraction
from deepex.data.simulation.crystals import CRYSTALS, Orientation, slab
from deepex.data.simulation.diffraction import CLASSES, NUISANCES, DiffractionPatterns, _orient, to_grey
from deepex.data.simulation.multislice import CENTRE, EXTENT, PIXEL, SLICE, Shot, expected_patterns
from deepex.errors import DataError
from tests.full import examples

BY_NAME = {crystal.name: crystal for crystal in CRYSTALS}
SPECIMENS = range(0, 27, 5)
NUMBERS = np.concatenate([np.arange(10) + 10 * specimen for specimen in SPECIMENS])


def read(images, numbers):
    out = np.full((len(numbers), *images.shape), 77, images.dtype)
    assert images.read(np.array(numbers, np.int64), out) == []
    return out


def ideal(name, *shots, orientation=None, displacement=0.0, seed=None):
    box = (EXTENT, EXTENT, SLICE * max(shot.slices for shot in shots))
    rng = None if seed is None else np.random.default_rng(seed)
    atoms = slab(BY_NAME[name], box, orientation=orientation or Orientation(), displacement=displacement, rng=rng)
    return expected_patterns(atoms, shots)


def difference(one, other):
    return np.abs(one - other).sum() / np.abs(one).sum()


@pytest.fixture(scope="module")
def train():
    return DiffractionPatterns(270, seed=5, part="train", engine="cpu")


@pytest.fixture(scope="module")
def patterns(train):
    return dict(zip(NUMBERS.tolist(), read(train, NUMBERS), strict=True))


def test_what_it_says_of_itself(train):
    assert (train.count, train.shape, train.dtype, train.busy, train.block) == (270, (120, 85, 1), np.uint8, True, 10)
    assert train.labels.dtype == np.int64
    assert np.bincount(train.labels).tolist() == [10] * 27
    assert len(set(CLASSES)) == 27
    assert "specimen 26" in train.name(265)
    assert CLASSES[26] in train.name(265)


def test_labels_go_round_the_classes_block_by_block():
    labels = DiffractionPatterns(1205, seed=0, part="validation", engine="cpu").labels
    assert labels.tolist() == [n // 10 % 27 for n in range(1205)]


def test_the_description_is_json_and_states_every_nuisance(train):
    description = json.loads(json.dumps(train.description))
    assert description == train.description
    assert (description["seed"], description["part"], description["engine"]) == (5, "train", "cpu")
    assert set(description["nuisances"]) == set(NUISANCES)
    assert {"thickness", "defocus", "tilt", "rotation", "position", "displacement", "dose", "shift", "blur"} <= set(NUISANCES)
    assert all(nuisance["low"] < nuisance["high"] and nuisance["unit"] for nuisance in description["nuisances"].values())


@pytest.mark.parametrize("name", NUISANCES)
def test_draws_fill_the_range_that_is_stated(name):
    nuisance = NUISANCES[name]
    values = nuisance.draw(np.random.default_rng(1), 2000)
    assert nuisance.low <= values.min() < nuisance.low + 0.01 * (nuisance.high - nuisance.low)
    assert nuisance.high - 0.01 * (nuisance.high - nuisance.low) < values.max() <= nuisance.high


@pytest.mark.parametrize("name", NUISANCES)
def test_every_nuisance_reaches_the_patterns(name, patterns, train, monkeypatch):
    nuisance = NUISANCES[name]
    monkeypatch.setitem(NUISANCES, name, replace(nuisance, high=(nuisance.low + nuisance.high) / 2))
    changed = read(train, range(50, 60))
    assert sum(not np.array_equal(patterns[50 + k], pattern) for k, pattern in enumerate(changed)) > 7


def test_tilts_are_of_milliradians_in_any_direction():
    rng = np.random.default_rng(1)
    tilts = np.array([_orient(rng).tilt for _ in range(1000)])
    assert 0.0095 < np.hypot(*tilts.T).max() <= 0.010
    assert (np.abs(tilts.mean(axis=0)) < 0.001).all()


def test_a_pattern_is_of_the_crystal_that_its_label_names(train, monkeypatch):
    cut = []

    def spy(crystal, *arguments, **options):
        cut.append(crystal.name)
        return slab(crystal, *arguments, **options)

    monkeypatch.setattr(diffraction, "slab", spy)
    read(train, [30, 139])
    assert cut == [CLASSES[label] for label in train.labels[[30, 139]]]


def test_pixels_count_whole_electrons(patterns):
    levels = set(np.unique(list(patterns.values())).tolist())
    assert levels <= set(to_grey(np.arange(5000)).tolist())
    assert {4, 6, 7, 8} <= levels  # 1 to 4 electrons; without counting there would be levels between


@settings(max_examples=5, deadline=None)
@given(numbers=st.sets(st.sampled_from([*range(10), *range(50, 60)]), min_size=1, max_size=6))
def test_any_part_of_any_block_has_the_bits_of_the_whole(patterns, numbers):
    other = pickle.loads(
        pickle.dumps(DiffractionPatterns(100, seed=5, part="train", engine="cpu"))
    )  # a worker's copy; another count
    chosen = sorted(numbers)
    np.testing.assert_array_equal(read(other, chosen), [patterns[number] for number in chosen])


def test_parts_seeds_specimens_and_shots_all_differ(patterns):
    validation = read(DiffractionPatterns(10, seed=5, part="validation", engine="cpu"), range(2))
    other_seed = read(DiffractionPatterns(10, seed=6, part="train", engine="cpu"), range(2))
    same_class = read(DiffractionPatterns(300, seed=5, part="train", engine="cpu"), range(270, 272))
    every = [*patterns.values(), *validation, *other_seed, *same_class]
    assert len({pattern.tobytes() for pattern in every}) == len(every)


def test_patterns_are_dark_with_bright_discs_and_compress_well(patterns):
    images = np.stack([patterns[number] for number in NUMBERS])
    assert 2 < images.mean() < 40
    assert all(image.max() > 40 for image in images)
    assert images.max() < 255  # nothing saturates
    assert len(lzma.compress(images.tobytes())) < 0.45 * images.nbytes


def test_grey_levels_are_a_fixed_square_root_of_counts():
    assert to_grey(np.array([0, 1, 4, 100, 10**6])).tolist() == [0, 4, 8, 40, 255]


@pytest.mark.parametrize("name", ["Al fcc [001]", "Au fcc [001]", "CaF2 fluorite [011]"])
def test_electrons_are_conserved_but_for_those_that_miss_the_detector(name):
    thin, thick = ideal(name, Shot(slices=1), Shot(slices=25)).sum(axis=(1, 2))
    assert 0.9 < thin <= 1.0
    assert 0.5 < thick < thin


# The shortest reflections of each zone; all are longer than two semiangles, so that discs stand apart.
@pytest.mark.parametrize(
    ("name", "reflection", "edge"),
    [
        ("Al fcc [001]", (2, 0), 4.049),
        ("Cu fcc [001]", (2, 0), 3.615),
        ("MgO rock salt [001]", (2, 0), 4.213),
        ("Fe bcc [001]", (1, 1), 2.866),
    ],
)
@pytest.mark.parametrize("degrees", [0.0, 30.0])
def test_discs_lie_on_the_reciprocal_lattice(name, reflection, edge, degrees):
    turn = np.deg2rad(degrees)
    pattern = ideal(name, Shot(slices=8), orientation=Orientation(rotation=turn))[0]
    cos, sin = np.cos(turn), np.sin(turn)
    g = np.array([[cos, -sin], [sin, cos]]) @ reflection / edge / PIXEL  # pixels
    for centre in (np.array(CENTRE), CENTRE + g, CENTRE - g):
        found = disc_centre(pattern, centre)
        assert np.hypot(*(found - centre)) < 1.0, (centre, found)


def disc_centre(pattern, near):
    rows, columns = np.mgrid[:120, :85]
    window = np.hypot(rows - near[0], columns - near[1]) < 15
    bright = window & (pattern > 0.4 * np.percentile(pattern[window], 90))
    return np.array([rows[bright].mean(), columns[bright].mean()])


def test_a_disc_is_as_wide_as_the_beam_converges():
    """8 mrad of electrons of 100 keV, whose wavelength is 0.03701 Å."""
    pattern = ideal("Al fcc [001]", Shot(slices=1))[0]
    bright = np.count_nonzero(pattern > pattern.max() / 2)  # the disc in the middle alone
    assert np.sqrt(bright / np.pi) * PIXEL == pytest.approx(0.008 / 0.03701, rel=0.03)


def test_a_shot_crosses_as_many_slices_as_it_says():
    atoms = slab(BY_NAME["Au fcc [001]"], (EXTENT, EXTENT, 6 * SLICE))
    whole, four, three = (
        expected_patterns(atoms[atoms.positions[:, 2] < slices * SLICE], [Shot(slices=4)])[0] for slices in (6, 4, 3)
    )
    assert difference(whole, four) < 1e-4
    assert difference(whole, three) > 0.05


@pytest.mark.parametrize("name", ["Al fcc [001]", "NaCl rock salt [001]", "SrTiO3 perovskite [001]"])
def test_a_fourfold_crystal_gives_a_fourfold_pattern(name):
    square = ideal(name, Shot(slices=10))[0][CENTRE[0] - 40 : CENTRE[0] + 41, CENTRE[1] - 40 : CENTRE[1] + 41]
    for turned in (np.rot90(square), np.rot90(square, 2), square[::-1]):
        assert difference(square, turned) < 0.02


def test_a_tilted_crystal_loses_its_symmetry():
    square = ideal("Al fcc [001]", Shot(slices=10), orientation=Orientation(tilt=(0.008, 0.0)))[0][20:101, 2:83]
    assert difference(square, np.rot90(square, 2)) > 0.05


def test_the_probe_position_shows_only_where_discs_overlap():
    shots = (Shot(slices=8), Shot(slices=8, position=(0.9, 0.5)))
    assert difference(*ideal("Al fcc [001]", *shots)) < 0.05
    assert difference(*ideal("CsCl caesium chloride [001]", *shots)) > 0.25


@pytest.mark.parametrize("change", [{"slices": 21}, {"defocus": 150.0}, {"position": (1.5, 0.7)}, {"shift": (2.5, -1.0)}])
def test_every_condition_of_a_shot_changes_its_pattern(change):
    base, other = ideal("SrTiO3 perovskite [001]", Shot(slices=15), Shot(**{"slices": 15, **change}))
    assert difference(base, other) > 0.04


@pytest.mark.parametrize(
    "change", [{"orientation": Orientation(rotation=0.2)}, {"orientation": Orientation(tilt=(0.0, 0.01))}, {"displacement": 0.1}]
)
def test_every_condition_of_a_specimen_changes_its_patterns(change):
    base, other = (ideal("SrTiO3 perovskite [001]", Shot(slices=15), seed=3, **options) for options in ({}, change))
    assert difference(base, other) > 0.08


def test_a_shift_moves_the_pattern_by_pixels():
    base, moved = ideal("NaCl rock salt [001]", Shot(slices=8), Shot(slices=8, shift=(3.0, -2.0)))
    np.testing.assert_allclose(moved[3:, :-2], base[:-3, 2:], atol=1e-3 * base.max())


def test_one_of_many_shots_is_as_when_taken_alone():
    shots = [Shot(slices=9), Shot(slices=4, position=(1.0, -2.0)), Shot(slices=9, defocus=-80.0)]
    atoms = slab(BY_NAME["Al fcc [001]"], (EXTENT, EXTENT, 9 * SLICE))
    together = expected_patterns(atoms, shots)
    for shot, pattern in zip(shots, together, strict=True):
        np.testing.assert_allclose(expected_patterns(atoms, [shot])[0], pattern, atol=1e-5 * pattern.max())


@pytest.mark.parametrize("crystal", [c for c in CRYSTALS if len(c.basis) == 1], ids=lambda crystal: crystal.name)
def test_elements_have_the_lattice_that_ase_knows(crystal):
    known = reference_states[atomic_numbers[crystal.basis[0][0]]]
    assert known["symmetry"] in crystal.name
    assert crystal.a == pytest.approx(known["a"], rel=3e-3)
    if crystal.c:
        assert crystal.c / crystal.a == pytest.approx(known["c/a"], rel=3e-3)


@pytest.mark.parametrize(
    ("name", "formula", "nearest"),
    [
        ("ZnS zincblende [011]", "ZnS", 5.409 * 3**0.5 / 4),
        ("MgO rock salt [001]", "MgO", 4.213 / 2),
        ("CsCl caesium chloride [001]", "CsCl", 4.123 * 3**0.5 / 2),
        ("InP zincblende [011]", "InP", 5.870 * 3**0.5 / 4),
        ("NaCl rock salt [001]", "NaCl", 5.640 / 2),
        ("CaF2 fluorite [011]", "CaF2", 5.463 * 3**0.5 / 4),
        ("CeO2 fluorite [011]", "CeO2", 5.411 * 3**0.5 / 4),
        ("SnO2 rutile [001]", "SnO2", 2.05),
        ("SrTiO3 perovskite [001]", "SrTiO3", 3.905 / 2),
        ("TiO2 rutile [001]", "TiO2", 1.9485),  # measured: Abrahams and Bernstein 1971
        ("TiO2 anatase [001]", "TiO2", 1.934),  # Horn, Schwerdtfeger and Meagher 1972
        ("GaN wurtzite [0001]", "GaN", 1.95),
    ],
)
def test_compounds_have_their_formula_and_bond_length(name, formula, nearest):
    cell = BY_NAME[name].unit_cell
    assert cell.symbols.formula.reduce()[0] == type(cell.symbols.formula)(formula).reduce()[0]
    distances = cell.repeat(2).get_all_distances(mic=True)
    assert distances[distances > 1e-6].min() == pytest.approx(nearest, abs=0.004)


@settings(max_examples=examples(7, 15), deadline=None)
@given(
    crystal=st.sampled_from(CRYSTALS),
    rotation=st.floats(-4, 4),
    tilt=st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1)),
    box=st.tuples(st.floats(21, 24), st.floats(21, 24), st.floats(21, 30)),  # the middle has a cell of each crystal
)
def test_a_slab_is_the_crystal_whatever_its_orientation(crystal, rotation, tilt, box):
    reach = 4.03
    atoms = slab(crystal, box, orientation=Orientation(rotation=rotation, tilt=tilt))
    assert ((atoms.positions >= 0) & (atoms.positions < box)).all()
    deep = ((atoms.positions > reach) & (atoms.positions < np.array(box) - reach)).all(axis=1)
    atoms.pbc = False
    assert neighbours(atoms, reach, deep) == neighbours(crystal.unit_cell, reach, slice(None))


def neighbours(atoms, reach, chosen):
    """What each kind of atom has around it, within reach: pairs of its number and how many."""
    counts = np.bincount(neighbor_list("i", atoms, reach), minlength=len(atoms))
    return set(zip(atoms.numbers[chosen].tolist(), counts[chosen].tolist(), strict=True))


@pytest.mark.slow
def test_atoms_vibrate_about_a_lattice_that_lies_anywhere():
    box, crystal = (30.0, 30.0, 30.0), BY_NAME["Al fcc [001]"]
    still, other = (slab(crystal, box, rng=np.random.default_rng(seed)).positions for seed in (1, 2))
    moving = slab(crystal, box, displacement=0.1, rng=np.random.default_rng(1)).positions
    deep = moving[((moving > 2) & (moving < 28)).all(axis=1)]
    offsets = [min(place - still, key=np.linalg.norm) for place in deep]
    np.testing.assert_allclose(np.std(offsets, axis=0), 0.1, rtol=0.1)
    assert min(np.linalg.norm(place - still, axis=1).min() for place in other) > 0.1  # another origin


@pytest.mark.parametrize("crystal", CRYSTALS, ids=lambda crystal: crystal.name)
def test_the_zone_axis_is_along_the_beam(crystal):
    period = np.linalg.norm(np.array(crystal.zone) @ crystal.unit_cell.cell.array)
    atoms = slab(crystal, (6.0, 6.0, 60.0))
    column = atoms.positions[np.hypot(*(atoms.positions[:, :2] - atoms.positions[0, :2]).T) < 1e-6, 2]
    periods = (column - column.min()) / period
    whole = np.sort(periods[np.abs(periods - np.rint(periods)) < 1e-6])
    assert len(whole) > 2
    np.testing.assert_allclose(np.diff(whole), 1.0, atol=1e-6)


def test_without_abtem_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "abtem", None)
    with pytest.raises(DataError, match=r"pip install 'deepex\[science\]'"):
        DiffractionPatterns(10, seed=0, part="train")


def test_the_default_is_the_cpu_and_without_cupy_gpu_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert DiffractionPatterns(10, seed=0, part="train").description["engine"] == "cpu"
    with pytest.raises(DataError, match="use engine 'cpu'"):
        DiffractionPatterns(10, seed=0, part="train", engine="gpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "0 samples of the part 'train'"),
        ({"seed": -1}, "seed is -1"),
        ({"part": "test"}, "'test'"),
        ({"engine": "tpu"}, "'tpu'"),
    ],
)
def test_bad_options_are_named(options, message):
    chosen = {"count": 10, "seed": 0, "part": "train", "engine": "cpu", **options}
    with pytest.raises(DataError, match=message):
        DiffractionPatterns(chosen.pop("count"), **chosen)
