"""What a folder is taken for: hidden names, links, and texts beside pictures."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from deepex.data.dataset import PackedDataset
from deepex.data.pack import pack
from deepex.data.source import open_source
from deepex.data.source.walk import walk
from deepex.errors import DataError


def write_pictures(folder: Path, count: int = 2) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((4, 5), number, np.uint8)).save(folder / f"{number}.png")


def test_hidden_files_beside_hdf5_are_left_alone(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((3, 4, 5), np.uint8)
    (tmp_path / "._a.h5").write_bytes(b"what macOS keeps beside a file on a foreign disk")
    assert open_source(tmp_path).train.count == 3


@pytest.mark.parametrize("parts", [["."], ["train", "val"]])
def test_class_folders_may_all_be_links(tmp_path: Path, parts: list[str]) -> None:
    for part in parts:
        (tmp_path / "in" / part).mkdir(parents=True)
        for name in ("a", "b"):
            write_pictures(tmp_path / "store" / part / name)
            (tmp_path / "in" / part / name).symlink_to(tmp_path / "store" / part / name)
    source = open_source(tmp_path / "in")
    assert (source.train.count, source.classes) == (4, ("a", "b"))
    assert (source.validation is None) == (len(parts) == 1)


def test_class_folders_of_texts_may_all_be_links(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "store" / name).mkdir(parents=True)
        (tmp_path / "store" / name / "0.dat").write_text("1 2\n3 4\n")
        (tmp_path / "in" / name).symlink_to(tmp_path / "store" / name)
    assert open_source(tmp_path / "in").classes == ("a", "b")


def test_a_walk_meets_each_folder_once_and_nothing_hidden(tmp_path: Path) -> None:
    for name in ("b/2", "b/1", "a/1", ".cache/1", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "self").symlink_to(tmp_path / "b" / "self")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert list(walk(tmp_path)) == [(tmp_path, []), (tmp_path / "a", ["1"]), (tmp_path / "b", ["1", "2", "self"])]


@pytest.mark.parametrize("name", ["README.txt", "classes.csv", ".cache/notes.txt", "a/a_boxes.txt", "train.txt.gz"])
def test_texts_beside_pictures_are_no_matrices(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        write_pictures(tmp_path / folder)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("about the pictures")
    source = open_source(tmp_path)
    assert (source.train.count, source.classes) == (4, ("a", "b"))


def write_tiny_imagenet(root: Path) -> None:
    """Its folders and texts, with two classes."""
    for name in ("n01", "n02"):
        write_pictures(root / "train" / name / "images")
        (root / "train" / name / f"{name}_boxes.txt").write_text("0.JPEG\t0\t32\t44\t62\n")
    write_pictures(root / "val" / "images")
    (root / "val" / "val_annotations.txt").write_text("0.png\tn02\t0\t32\t44\t62\n1.png\tn01\t0\t32\t44\t62\n")
    (root / "words.txt").write_text("n01\tgoldfish\n")


def test_tiny_imagenet_is_packed_with_its_classes(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    write_tiny_imagenet(root)
    with pytest.raises(DataError, match=r"all in one folder, images, which is no class .* with --validation LIST"):
        open_source(root)
    (root / "val.txt").write_text("val/images/0.png n02\nval/images/1.png n01\n")
    manifest = pack(root / "train", tmp_path / "out", validation=root / "val.txt")
    assert manifest.classes == ("n01", "n02")
    parts = {name: PackedDataset.open(tmp_path / "out").part(name) for name in ("train", "validation")}
    assert sorted(parts["train"].read(0, 4)[1].tolist()) == [0, 0, 1, 1]
    images, labels = parts["validation"].read(0, 2)
    assert sorted(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_matrices_as_text_are_none_the_less_with_a_plot_beside_them(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", 1)
    for number in range(11):
        (tmp_path / "in" / f"{number}.dat").write_text("1 2\n3 4\n")
    source = open_source(tmp_path / "in")
    assert (source.train.count, source.train.shape) == (11, (2, 2, 1))
