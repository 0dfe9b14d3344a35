"""Which arrays of an archive or of an HDF5 file become images and labels, packed and read directly."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from deepex.data.dataset import PackedDataset
from deepex.data.direct import Hdf5Config, Hdf5Dataset
from deepex.data.pack import pack
from deepex.data.source.names import ArrayNames, usual, with_labels
from deepex.errors import DataError

FINE, COARSE = np.arange(12) % 6, np.arange(12) % 6 // 3


def images(count: int = 12) -> Any:
    return np.arange(count * 6, dtype=np.uint8).reshape(count, 2, 3)


def write_npz(path: Path, arrays: Mapping[str, Any]) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_hdf5(path: Path, arrays: Mapping[str, Any]) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for key, values in arrays.items():
            file[key] = values
    return path.with_suffix(".h5")


Writer = Callable[[Path, Mapping[str, Any]], Path]
either = pytest.mark.parametrize("write", [write_npz, write_hdf5])


def labels_of(out: Path) -> dict[str, list[int]]:
    """The labels of each part, of the samples in the order of their first pixels."""
    dataset = PackedDataset.open(out)
    found = {}
    for name in dataset.manifest.parts:
        part = dataset.part(name)
        pixels, labels = part.read(0, part.count)
        found[name] = [] if labels is None else labels[np.argsort(pixels[:, 0, 0, 0])].tolist()
    return found


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ("x_train y_train x_val y_val x_test", ("x_train", "y_train", "x_val", "y_val")),
        ("x_train x_test y_test", ("x_train", None, "x_test", "y_test")),
        ("train_images train_labels test_images", ("train_images", "train_labels", "test_images", None)),
        ("images data labels", ("images", "labels", None, None)),
        ("images data label", ("data", "label", None, None)),
        ("X y", ("X", "y", None, None)),
        ("data x", ("data", None, None, None)),
    ],
)
def test_names_in_use_are_known(present: str, found: tuple[str | None, ...]) -> None:
    assert usual(set(present.split()).__contains__) == found


def test_strange_names_are_not_guessed() -> None:
    assert usual({"frames", "labels"}.__contains__) is None


def test_labels_that_were_given_go_before_the_usual_ones() -> None:
    names = ArrayNames("x_train", "y_train", "x_test", "y_test")
    assert with_labels(names, Path("a"), "a", "b") == ("x_train", "a", "x_test", "b")
    assert with_labels(names, Path("a"), None, "b") == ("x_train", "y_train", "x_test", "b")
    assert with_labels(names, Path("a"), None, None) == names


@either
def test_labels_of_both_parts_come_from_one_hand(tmp_path: Path, write: Writer) -> None:
    arrays = {f"x_{part}": images() for part in ("train", "test")}
    arrays |= {f"y_{part}": FINE for part in ("train", "test")} | {f"coarse_{part}": COARSE for part in ("train", "test")}
    source = write(tmp_path / "a", arrays)
    with pytest.raises(DataError, match=r"has validation images too, x_test; name their labels with --validation-labels"):
        pack(source, tmp_path / "out", labels="coarse_train")
    manifest = pack(source, tmp_path / "out", labels="coarse_train", validation_labels="coarse_test")
    assert labels_of(tmp_path / "out") == {"train": COARSE.tolist(), "validation": COARSE.tolist()}
    assert "--labels coarse_train --validation-labels coarse_test" in manifest.source["command"]


def test_hdf5_as_it_is_takes_both_labels_too(tmp_path: Path) -> None:
    arrays = {"x_train": images(), "y_train": FINE, "x_test": images(), "y_test": FINE, "c": COARSE, "d": 1 - COARSE}
    source = write_hdf5(tmp_path / "a", arrays)
    with pytest.raises(DataError, match=r"data_options\.validation_labels"):
        Hdf5Dataset.open(source, Hdf5Config(labels="c"))
    dataset = Hdf5Dataset.open(source, Hdf5Config(labels="c", validation_labels="d"))
    assert dataset.manifest.classes == ("0", "1")
    assert sorted(dataset.part("validation").labels(np.arange(12)).tolist()) == sorted((1 - COARSE).tolist())


@either
def test_validation_labels_need_validation_images(tmp_path: Path, write: Writer) -> None:
    source = write(tmp_path / "a", {"images": images(), "labels": FINE})
    with pytest.raises(DataError, match="without validation images"):
        pack(source, tmp_path / "out", validation_labels="labels")


@either
def test_another_source_has_its_labels_under_the_same_name(tmp_path: Path, write: Writer) -> None:
    source = write(tmp_path / "a", {"images": images(), "labels": FINE, "kinds": COARSE})
    held = write(tmp_path / "b", {"images": images(), "labels": FINE, "kinds": 1 - COARSE})
    pack(source, tmp_path / "out", labels="kinds", validation=held)
    assert labels_of(tmp_path / "out") == {"train": COARSE.tolist(), "validation": (1 - COARSE).tolist()}


@pytest.mark.parametrize("name", [{}, {"images": "images"}])
def test_labels_of_an_archive_may_be_in_a_file_of_their_own(tmp_path: Path, name: dict[str, str]) -> None:
    source = write_npz(tmp_path / "a", {"images": images(), "labels": FINE})
    np.save(tmp_path / "l.npy", COARSE)
    manifest = pack(source, tmp_path / "out", labels=tmp_path / "l.npy", validation=0, **name)
    assert labels_of(tmp_path / "out") == {"train": COARSE.tolist()}
    assert manifest.source["files"] == ["a.npz", "l.npy"]


@pytest.mark.parametrize("name", [{}, {"images": "images"}])
@either
def test_labels_that_are_not_there_are_an_error(tmp_path: Path, write: Writer, name: dict[str, str]) -> None:
    source = write(tmp_path / "a", {"images": images(), "labels": FINE})
    with pytest.raises(DataError, match=r"has no (array 'lables'|dataset lables).* it has images.*labels"):
        pack(source, tmp_path / "out", labels="lables", **name)


@pytest.mark.parametrize("group", ["", "entry/"])
def test_labels_beside_the_only_images_are_found(tmp_path: Path, group: str) -> None:
    source = write_hdf5(tmp_path / "a", {f"{group}frames": images(), f"{group}y": FINE[:, None], "labels": FINE[:3]})
    pack(source, tmp_path / "out", validation=0)
    assert labels_of(tmp_path / "out") == {"train": FINE.tolist()}


def test_what_is_not_as_many_as_the_images_is_not_taken_for_their_labels(tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "a", {"frames": images(), "labels": FINE[:3], "y": np.zeros((12, 4))})
    assert pack(source, tmp_path / "out", validation=0).classes == ()
