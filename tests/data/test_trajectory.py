"""Trajectories as contact maps: files written by OpenMM (DCD, XTC, PDB), by MDAnalysis's own writer (TRR) or as text."""

import multiprocessing
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepex.data.pack import pack
from deepex.data.source import SourceConfig, open_source, trajectory
from deepex.data.source.base import Bad, Images
from deepex.data.source.trajectory import open_trajectory
from deepex.errors import DataError
from tests.full import examples

pytest.importorskip("MDAnalysis", reason="trajectories need the extra `science`")
openmm = pytest.importorskip("openmm", reason="the extra `science` brings OpenMM, which writes the files of these tests")

Array = NDArray[Any]
FORMATS = ("dcd", "xtc", "trr", "pdb", "xyz")
WITHOUT_BOX = ("pdb", "xyz")
BOX = 20.0


def chain(count: int, atoms: int = 14, seed: int = 0) -> Array:
    """Atoms anywhere in the box, in Å, rounded to what all formats keep; half of the contacts are across its faces."""
    return np.random.default_rng(seed).uniform(0.01, BOX - 0.01, (count, atoms, 3)).round(2)


def made_of(atoms: int) -> Any:
    """A chain of alanines with CA and, in the first residue, a CB too."""
    from openmm import app

    made = app.Topology()
    strand = made.addChain("A")
    for number in range(atoms - 1):
        residue = made.addResidue("ALA", strand)
        made.addAtom("CA", app.element.carbon, residue)
        if number == 0:
            made.addAtom("CB", app.element.carbon, residue)
    made.setUnitCellDimensions((BOX / 10,) * 3)
    return made


def write(path: Path, frames: Array) -> Path:
    from openmm import Vec3, app, unit

    atoms = made_of(frames.shape[1])
    positions = [[Vec3(*map(float, place / 10)) for place in frame] * unit.nanometer for frame in frames]
    if path.suffix == ".pdb":
        with path.open("w") as file:
            app.PDBFile.writeHeader(atoms, file)
            for number, frame in enumerate(positions):
                app.PDBFile.writeModel(atoms, frame, file, modelIndex=number + 1 if len(frames) > 1 else None)
            app.PDBFile.writeFooter(atoms, file)
    elif path.suffix == ".dcd":
        with path.open("wb") as file:
            dcd = app.DCDFile(file, atoms, 0.002)
            for frame in positions:
                dcd.writeModel(frame, unitCellDimensions=Vec3(*[BOX / 10] * 3) * unit.nanometer)
    elif path.suffix == ".xtc":
        xtc = app.XTCFile(str(path), atoms, 0.002)
        for frame in positions:
            xtc.writeModel(frame, unitCellDimensions=Vec3(*[BOX / 10] * 3) * unit.nanometer)
    else:
        write_with_mdanalysis(path, frames, [BOX] * len(frames))
    return path


def write_with_mdanalysis(path: Path, frames: Array, boxes: Sequence[float]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import MDAnalysis

        universe = MDAnalysis.Universe.empty(frames.shape[1], trajectory=True)
        with MDAnalysis.Writer(str(path), frames.shape[1]) as writer:
            for frame, box in zip(frames, boxes, strict=True):
                universe.atoms.positions = frame
                universe.dimensions = [box, box, box, 90, 90, 90]
                writer.write(universe.atoms)
    return path


def topology(folder: Path, atoms: int = 14) -> Path:
    return write(folder / "topology.pdb", chain(1, atoms))


def apart(frames: Array, box: float | None) -> Array:
    """Distances between the CA atoms, all but the second; in a box, those to the nearest image."""
    chosen = np.delete(frames.astype(np.float64), 1, axis=1)
    between = chosen[:, :, None] - chosen[:, None]
    return np.asarray(np.linalg.norm(between - box * np.rint(between / box) if box else between, axis=-1))


def read(images: Images, numbers: Any) -> tuple[Array, list[Bad]]:
    out = np.full((len(numbers), *images.shape), 9, images.dtype)
    bad = images.read(np.asarray(numbers, np.int64), out)
    return out[..., 0], bad


def agree(found: Array, frames: Array, cutoff: float, *, box: float | None = None) -> None:
    distances = apart(frames, box)
    clear = np.abs(distances - cutoff) > 0.02  # XTC keeps 0.01 Å, PDB 0.001
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[clear], (distances < cutoff)[clear])


@settings(deadline=None, max_examples=examples(8, 25))
@given(st.sampled_from(FORMATS), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_contact_maps_are_those_of_the_coordinates(
    tmp_path_factory: pytest.TempPathFactory, kind: str, counts: list[int], data: st.DataObject
) -> None:
    stride, cutoff = data.draw(st.integers(1, 4)), data.draw(st.floats(3, 12))
    box = BOX if kind not in WITHOUT_BOX and data.draw(st.booleans()) else None
    atoms = data.draw(st.sampled_from((9, 14)))  # up to 9, XTC is not compressed
    folder = tmp_path_factory.mktemp("md")
    frames = [chain(count, atoms, seed) for seed, count in enumerate(counts)]
    paths = [write(folder / f"{number}.{kind}", each) for number, each in enumerate(frames)]
    images = open_trajectory(topology(folder, atoms), paths, cutoff=cutoff, stride=stride, pbc=box is not None).train
    expected = np.concatenate([each[::stride] for each in frames])
    assert (images.count, images.shape, images.dtype, images.busy) == (
        len(expected),
        (atoms - 1, atoms - 1, 1),
        np.dtype(np.uint8),
        True,
    )
    numbers = sorted(data.draw(st.sets(st.integers(0, len(expected) - 1), min_size=1)))
    with mock.patch.multiple(trajectory, _PIECE_BYTES=data.draw(st.sampled_from((1, 5000, 1 << 21)))):
        for chosen in (np.arange(len(expected)), np.array(numbers)):
            found, bad = read(pickle.loads(pickle.dumps(images)), chosen)
            assert bad == []
            agree(found, expected[chosen], cutoff, box=box)
    assert {entry.name for entry in folder.iterdir()} == {"topology.pdb", *(path.name for path in paths)}  # nothing is left behind


def test_the_files_and_choices_are_described(tmp_path: Path) -> None:
    images = open_trajectory(
        topology(tmp_path), [write(tmp_path / "a.dcd", chain(5))], stride=2, select="name CA and resid 1:4"
    ).train
    assert images.shape == (4, 4, 1)
    assert images.name(2) == f"{tmp_path / 'a.dcd'} frame 4"
    assert images.description == {
        "format": "trajectory",
        "files": ["a.dcd"],
        "cutoff": 8.0,
        "stride": 2,
        "topology": "topology.pdb",
        "select": "name CA and resid 1:4",
        "periodic": False,
        "atoms": 4,
    }


def test_a_folder_gives_its_trajectories_without_the_topology(tmp_path: Path) -> None:
    config = SourceConfig(topology=topology(tmp_path))
    with pytest.raises(DataError, match="has no trajectory"):
        open_source(tmp_path, config)
    for name, count in (("train-00000.dcd", 3), ("train-00001.dcd", 2)):
        write(tmp_path / name, chain(count))
    (tmp_path / ".half.pdb").write_text("")
    source = open_source(tmp_path, config)
    assert (source.train.count, source.validation) == (5, None)
    for name, count in (("validation-00000.dcd", 4), ("validation-00001.xtc", 2)):
        write(tmp_path / name, chain(count, seed=1))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    source = open_source(link, config)
    assert source.validation is not None
    assert (source.train.count, source.validation.count) == (5, 6)
    assert source.validation.description["topology"] == "topology.pdb"
    found, bad = read(source.validation, range(6))
    assert bad == []
    agree(found, np.concatenate([chain(4, seed=1), chain(2, seed=1)]), 8.0)
    write(tmp_path / "more.dcd", chain(1))
    source = open_source(tmp_path, config)
    assert (source.train.count, source.validation) == (12, None)


def test_labels_for_a_trajectory_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcd", chain(3))
    np.save(tmp_path / "l.npy", np.arange(3))
    with pytest.raises(DataError, match=r"--labels l\.npy was given, but has no effect on .*a\.dcd"):
        pack(path, tmp_path / "out", topology=topology(tmp_path), labels=tmp_path / "l.npy")


def write_by_hand(path: Path, frames: Array) -> Path:
    """As LAMMPS (`dump … custom … id type x y z`) and Amber print; NetCDF by MDAnalysis, under a name that it does not know."""
    if path.suffix == ".netcdf":
        return write_with_mdanalysis(path.with_suffix(".nc"), frames, [BOX] * len(frames)).rename(path)
    if path.suffix in {".mdcrd", ".crdbox"}:
        text = "made for a test\n"
        for frame in frames:
            values = [f"{value:8.3f}" for value in frame.ravel()]
            text += "".join("".join(values[at : at + 10]) + "\n" for at in range(0, len(values), 10))
            text += "".join([f"{BOX:8.3f}"] * 3) + "\n" if path.suffix == ".crdbox" else ""
    else:
        head = "ITEM: TIMESTEP\n{}\nITEM: NUMBER OF ATOMS\n{}\nITEM: BOX BOUNDS pp pp pp\n" + f"0.0 {BOX}\n" * 3
        text = ""
        for number, frame in enumerate(frames):
            text += head.format(number, len(frame)) + "ITEM: ATOMS id type x y z\n"
            text += "".join(f"{atom} 1 {x} {y} {z}\n" for atom, (x, y, z) in enumerate(frame.tolist(), 1))
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["lammpstrj", "lammpsdump", "mdcrd", "crdbox", "netcdf"])
def test_more_formats_are_found_in_a_folder_and_read(tmp_path: Path, kind: str) -> None:
    write_by_hand(tmp_path / f"a.{kind}", chain(3))
    write_by_hand(tmp_path / f"b.{kind}", chain(2, seed=1))
    with pytest.raises(DataError, match=rf"a\.{kind} is a trajectory, .* --topology"):
        open_source(tmp_path / f"a.{kind}")
    source = open_source(tmp_path, SourceConfig(topology=topology(tmp_path)))
    found, bad = read(source.train, range(source.train.count))
    assert bad == []
    agree(found, np.concatenate([chain(3), chain(2, seed=1)]), 8.0)


def test_a_selection_may_ask_for_coordinates(tmp_path: Path) -> None:
    frames = chain(3)
    near = (apart(frames, BOX)[0, 0, 1:] < 9).sum()  # MDAnalysis selects with the box
    path = write(tmp_path / "a.xtc", frames)
    images = open_trajectory(topology(tmp_path), [path], select="name CA and (index 0 or around 9 index 0)").train
    assert images.shape[0] == near + 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"select": "name XY"}, r"'name XY' matches 0 of the 14 atoms"),
        ({"select": "resid 3"}, r"matches 1 of the 14 atoms of .*topology\.pdb; a contact map needs 2"),
        ({"select": "nmae CA and"}, r"the selection 'nmae CA and' cannot be made"),
        ({"cutoff": 0.0}, "cut-off is 0"),
        ({"cutoff": float("nan")}, "cut-off is nan"),
        ({"stride": 0}, "stride is 0"),
    ],
)
def test_wrong_choices_are_named(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "a.dcd", chain(2))
    with pytest.raises(DataError, match=reason):
        open_trajectory(topology(tmp_path), [path], **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_that_do_not_belong_together_are_named(tmp_path: Path, kind: str) -> None:
    good, other = write(tmp_path / f"a.{kind}", chain(2)), write(tmp_path / f"b.{kind}", chain(2, 15))
    with pytest.raises(DataError, match=rf"b\.{kind} has 15 atoms, .*topology\.pdb has 14"):
        open_trajectory(topology(tmp_path), [good, other])


def test_what_is_no_trajectory_is_named(tmp_path: Path) -> None:
    top = topology(tmp_path)
    (tmp_path / "empty.dcd").write_bytes(b"")
    (tmp_path / "noise.dcd").write_bytes(b"noise" * 100)
    (tmp_path / "a.xyzzy").write_text("what is this")
    for name, reason in (
        ("no.dcd", "there is no trajectory"),
        ("empty.dcd", "0 bytes"),
        ("noise.dcd", "cannot be read"),
        ("a.xyzzy", "cannot"),
    ):
        with pytest.raises(DataError, match=reason):
            open_trajectory(top, [tmp_path / name])
    with pytest.raises(DataError, match="cannot be read as a topology"):
        open_trajectory(tmp_path / "noise.dcd", [write(tmp_path / "a.dcd", chain(2))])
    with pytest.raises(DataError, match="no trajectory was given"):
        open_trajectory(top, [])


@pytest.mark.parametrize("kind", ["dcd", "xtc", "trr"])
@pytest.mark.parametrize("missing", [1, 13, 40])
def test_a_truncated_trajectory_loses_its_last_frame_and_says_so(tmp_path: Path, kind: str, missing: int) -> None:
    frames = chain(6)
    path = write(tmp_path / f"a.{kind}", frames)
    raw = path.read_bytes()
    for content in (raw[:-missing], raw + raw[-400:][:missing] if kind == "dcd" else raw + raw[: 100 - missing]):
        path.write_bytes(content)
        images = open_trajectory(topology(tmp_path), [path]).train
        found, bad = read(images, range(images.count))
        assert [entry.place for entry in bad] == [images.count - 1]
        assert "offset" in bad[0].reason or "ends within this frame" in bad[0].reason
        agree(found[:-1], frames[: images.count - 1], 8.0)


def test_a_text_that_ends_within_a_frame_says_so(tmp_path: Path) -> None:
    frames = chain(6)
    path = write(tmp_path / "a.xyz", frames)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-8]))
    found, bad = read(open_trajectory(topology(tmp_path), [path]).train, range(6))
    assert [(entry.place, "ends within this frame" in entry.reason) for entry in bad] == [(5, True)]
    agree(found[:5], frames[:5], 8.0)


@pytest.mark.parametrize("kind", ["dcd", "xtc", "trr"])
def test_each_frame_is_measured_in_its_own_box(tmp_path: Path, kind: str) -> None:
    """As of a simulation at constant pressure."""
    frames, sizes = chain(6), [20.0, 26.0, 21.0, 30.0, 24.0, 40.0]
    path = write_with_mdanalysis(tmp_path / f"a.{kind}", frames, sizes)
    found, bad = read(open_trajectory(topology(tmp_path), [path], pbc=True).train, range(6))
    assert bad == []
    for number, size in enumerate(sizes):
        agree(found[[number]], frames[[number]], 8.0, box=size)


def test_coordinates_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcd", chain(3))
    raw = bytearray(path.read_bytes())
    frame_bytes = 3 * (14 * 4 + 8) + 56
    at = len(raw) - 2 * frame_bytes + 56 + 4 + 4 * 3  # x of atom 3 in the second frame
    assert struct.unpack_from("<f", raw, at)[0] == pytest.approx(chain(3)[1, 3, 0])
    struct.pack_into("<f", raw, at, float("nan"))
    path.write_bytes(raw)
    found, bad = read(open_trajectory(topology(tmp_path), [path]).train, range(3))
    assert [(entry.place, entry.name) for entry in bad] == [(1, f"{path} frame 1")]
    assert "atom 3 is at [nan, " in bad[0].reason
    agree(found[[0, 2]], chain(3)[[0, 2]], 8.0)


def test_a_damaged_frame_is_found_before_it_is_unpacked(tmp_path: Path) -> None:
    """Its run lengths would write beyond the memory that the decoder has."""
    frames = chain(8, 30)
    path = write(tmp_path / "a.xtc", frames)
    offsets = open_trajectory(topology(tmp_path, 30), [path]).train._files[0].offsets  # type: ignore[attr-defined]
    raw = bytearray(path.read_bytes())
    raw[offsets[4] + 96 : offsets[4] + 130] = b"\xff" * 34
    path.write_bytes(raw)
    found, bad = read(open_trajectory(topology(tmp_path, 30), [path]).train, range(8))
    assert [entry.place for entry in bad] == [4]
    assert "compressed coordinates are damaged" in bad[0].reason
    agree(np.delete(found, 4, 0), np.delete(frames, 4, 0), 8.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trajectory_that_is_cut_while_it_is_read_loses_the_frames_that_are_gone(tmp_path: Path, kind: str) -> None:
    frames = chain(20)
    path = write(tmp_path / f"a.{kind}", frames)
    images = open_trajectory(topology(tmp_path), [path]).train
    os.truncate(path, path.stat().st_size // 2)
    found, bad = read(images, range(20))
    lost = [entry.place for entry in bad]
    assert 9 <= len(lost) <= 11
    agree(np.delete(found, lost, 0), np.delete(frames, lost, 0), 8.0)


@pytest.mark.parametrize("line", ["C 1.0 2.0", "", "C 1.0 2.0 x"])
def test_a_bad_line_in_a_frame_of_text_is_the_loss_of_that_frame(tmp_path: Path, line: str) -> None:
    frames = chain(12)
    path = write(tmp_path / "a.xyz", frames)
    lines = path.read_text().splitlines()
    lines[6 * 16 + 5] = line
    path.write_text("\n".join(lines) + "\n")
    found, bad = read(open_trajectory(topology(tmp_path), [path]).train, range(12))
    assert [entry.place for entry in bad] == [6]
    agree(np.delete(found, 6, 0), np.delete(frames, 6, 0), 8.0)


def test_a_frame_without_a_box_is_not_taken_for_periodic(tmp_path: Path) -> None:
    _, bad = read(open_trajectory(topology(tmp_path), [write(tmp_path / "a.pdb", chain(3))], pbc=True).train, range(3))
    assert [entry.place for entry in bad] == [0, 1, 2]
    assert "has no periodic box" in bad[0].reason


@pytest.mark.parametrize("kind", FORMATS)
def test_a_name_that_is_not_utf_8_is_to_be_changed(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"a.{kind}", chain(3)).rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff." + kind.encode()))
    with pytest.raises(DataError, match=rf"trajectory .*/\\xff\.{kind} is not UTF-8, .*; rename it"):
        open_trajectory(topology(tmp_path), [path])


def test_a_file_that_vanishes_ends_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcd", chain(3))
    images = open_trajectory(topology(tmp_path), [path]).train
    path.unlink()
    with pytest.raises(DataError, match="there is no trajectory"):
        read(images, range(3))


def test_without_mdanalysis_the_remedy_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcd", chain(3))
    with mock.patch.dict(sys.modules, {"MDAnalysis": None}), pytest.raises(DataError, match=r"pip install 'deepex\[science\]'"):
        open_trajectory(topology(tmp_path), [path])


# A decoder that is fed damage can end the process, hence the child; and the examples are the same every time.
@settings(deadline=None, max_examples=examples(50, 200), derandomize=True, database=None)
@given(st.sampled_from(FORMATS), st.data())
def damage(folder: Path, kind: str, data: st.DataObject) -> None:
    raw = bytearray((folder / f"whole.{kind}").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 300))] = data.draw(st.integers(0, 255))
    path = folder / f"damaged.{kind}"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        images = open_trajectory(folder / "topology.pdb", [path], pbc=data.draw(st.booleans())).train
        found, bad = read(images, range(min(images.count, 50)))
    except DataError:
        return
    good = np.setdiff1d(np.arange(len(found)), [entry.place for entry in bad])
    assert found[good].max(initial=0) <= 1
    alone = [read(images, [number]) for number in range(len(found))]
    assert [number for number, (_, reasons) in enumerate(alone) if not reasons] == good.tolist()
    assert all((found[number] == alone[number][0][0]).all() for number in good)
    assert all(path.name in entry.name for entry in bad)


def damage_many(folder: Path) -> None:
    damage(folder)  # what hypothesis makes of a function cannot be sent to a child


def test_damaged_bytes_never_crash(tmp_path: Path) -> None:
    topology(tmp_path)
    for kind in FORMATS:
        write(tmp_path / f"whole.{kind}", chain(5))
    child = multiprocessing.get_context("spawn").Process(target=damage_many, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0, f"see the last damaged file in {tmp_path}"
