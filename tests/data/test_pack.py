import gzip
import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from deepex.cli.data import app
from deepex.data.dataset import PackedDataset
from deepex.data.find import SAMPLES
from deepex.data.manifest import load
from deepex.data.pack import pack
from deepex.data.packing import writer
from deepex.data.packing.check import class_names
from deepex.data.source import Source, open_source, stream
from deepex.errors import DataError
from tests.full import examples

SAMPLE = SAMPLES / "fashion"
Array = NDArray[Any]


def write_idx(path: Path, array: Array, code: int = 0x08) -> Path:
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_npy(path: Path, array: Array) -> Path:
    np.save(path, array)
    return path


def everything(directory: Path) -> dict[str, tuple[Array, Array]]:
    dataset = PackedDataset.open(directory)
    assert dataset.verify() == []
    return {name: dataset.part(name).read(0, part.count) for name, part in dataset.manifest.parts.items()}


def multiset(images: Array, labels: Array) -> Counter[tuple[bytes, int]]:
    return Counter((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def numbered(count: int, shape: tuple[int, ...] = (2, 3)) -> tuple[Array, Array]:
    """Images that tell their number, sorted by class as sources often are."""
    images = np.zeros((count, *shape), np.uint8)
    images.reshape(count, -1)[:, 0] = np.arange(count)
    return images, np.sort(np.arange(count) % 4)


@settings(deadline=None, max_examples=examples(10, 30))
@given(st.data())
def test_what_is_packed_is_read_back_with_its_labels(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("any")
    count = data.draw(st.integers(1, 12))
    shape = (count, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 4])))
    dtype = data.draw(st.sampled_from([np.uint8, np.float32]))
    finite = {"allow_nan": False, "allow_infinity": False} if dtype is np.float32 else {}
    images = data.draw(hnp.arrays(dtype, shape, elements=finite))
    labels = data.draw(hnp.arrays(np.int16, count, elements=st.integers(0, 5)))
    pack(
        write_npy(directory / "i.npy", images),
        directory / "out",
        labels=write_npy(directory / "l.npy", labels),
        validation=data.draw(st.floats(0, 0.99)),
        given_order=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**40)),
        file_bytes=data.draw(st.integers(1, 500)),
    )
    parts = everything(directory / "out")
    assert sum((multiset(*part) for part in parts.values()), Counter()) == multiset(images, labels)


@settings(deadline=None, max_examples=examples(10, 40))
@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.float32, np.int32]),
        hnp.array_shapes(min_dims=4, max_dims=4, max_side=4).map(lambda shape: (*shape[:3], 3)),
        elements=st.integers(0, 100),
    ),
    st.integers(1, 64),
    st.sampled_from([None, 1]),
)
def test_mean_and_deviation_are_those_of_the_mapped_train_part(
    tmp_path_factory: pytest.TempPathFactory, images: Array, block_bytes: int, file_bytes: int | None
) -> None:
    """Also of a part of many files."""
    directory = tmp_path_factory.mktemp("moments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_BLOCK_BYTES", block_bytes)
        options: Any = {"validation": 0.3, "layout": "NHWC", "file_bytes": file_bytes}
        manifest = pack(write_npy(directory / "i.npy", images), directory / "out", **options)
    train = everything(directory / "out")["train"][0].astype(np.float64)
    low, high = manifest.scale
    if images.dtype == np.float32:
        least, greatest = train.min(), train.max()
        assert (low, high) == (least, greatest if greatest > least else least + max(1, least))
    else:
        assert (low, high) == (0, 1 if train.max() <= 1 else 255)
    mapped = (train - low) / (high - low)
    np.testing.assert_allclose(manifest.mean, mapped.mean(axis=(0, 1, 2)), atol=1e-12)
    expected = mapped.std(axis=(0, 1, 2))
    np.testing.assert_allclose(manifest.deviation, np.where(np.ptp(train, axis=(0, 1, 2)) > 0, expected, 1), rtol=1e-9)


def test_an_offset_far_above_the_spread_does_not_spoil_the_deviation(tmp_path: Path) -> None:
    images = (1e6 + np.arange(4000).reshape(1000, 2, 2) % 2).astype(np.float32)
    manifest = pack(write_npy(tmp_path / "i.npy", images), tmp_path / "out", validation=0, scale=(0, 1))
    assert manifest.mean == pytest.approx((1e6 + 0.5,))
    assert manifest.deviation == pytest.approx((0.5,))


def test_a_constant_channel_has_deviation_1(tmp_path: Path) -> None:
    images = np.full((7, 11, 13, 3), 0.1, np.float32)
    images[..., 1] = np.arange(7)[:, None, None]
    manifest = pack(write_npy(tmp_path / "i.npy", images), tmp_path / "out", validation=0)
    assert manifest.deviation == pytest.approx((1, 2 / 6, 1), rel=1e-6)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_directory_like_that_of_mnist_becomes_train_and_validation(tmp_path: Path, suffix: str) -> None:
    images, labels = numbered(50)
    source = tmp_path / "mnist"
    source.mkdir()
    write_idx(source / f"train-images-idx3-ubyte{suffix}", images[:40])
    write_idx(source / f"train-labels-idx1-ubyte{suffix}", labels[:40].astype(np.uint8))
    write_idx(source / f"t10k-images-idx3-ubyte{suffix}", images[40:])
    write_idx(source / f"t10k-labels-idx1-ubyte{suffix}", labels[40:].astype(np.uint8))
    manifest = pack(source, tmp_path / "out")
    parts = everything(tmp_path / "out")
    assert multiset(*parts["train"]) == multiset(images[:40], labels[:40])
    assert multiset(*parts["validation"]) == multiset(images[40:], labels[40:])
    assert manifest.name == "mnist"
    assert manifest.classes == ("0", "1", "2", "3")
    assert manifest.source["files"][0] == f"train-images-idx3-ubyte{suffix}"
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()


@pytest.mark.parametrize("other", ["train-labels-idx1-ubyte.gz", "train-labels.idx1-ubyte"])
def test_two_files_of_one_name_in_a_directory_like_that_of_mnist_are_named(tmp_path: Path, other: str) -> None:
    images, labels = numbered(12)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels.astype(np.uint8))
    write_idx(tmp_path / other, labels[::-1].astype(np.uint8))
    with pytest.raises(DataError, match=r"has both train-labels.idx1-ubyte and train-labels.idx1-ubyte.*; keep one") as caught:
        pack(tmp_path, tmp_path / "out")
    assert other in str(caught.value)


def test_one_idx_file_of_big_endian_numbers_with_its_labels(tmp_path: Path) -> None:
    images = np.array([[[-1.5, 2]], [[3, 4]]], ">f4")
    labels = write_idx(tmp_path / "l.gz", np.array([1, 0], np.uint8))
    manifest = pack(write_idx(tmp_path / "i", images, 0x0D), tmp_path / "out", labels=labels, validation=0, given_order=True)
    assert manifest.scale == (-1.5, 4.0)
    assert everything(tmp_path / "out")["train"][0].reshape(2, 2).tolist() == [[-1.5, 2], [3, 4]]


@pytest.mark.parametrize("names", [("x_train", "y_train"), ("images", "labels"), ("x", "y")])
def test_an_npz_under_the_usual_names(tmp_path: Path, names: tuple[str, str]) -> None:
    images, labels = numbered(12)
    put(tmp_path / "a.npz", {names[0]: images, names[1]: labels[:, None]})
    pack(tmp_path / "a.npz", tmp_path / "out", validation=0)
    assert multiset(*everything(tmp_path / "out")["train"]) == multiset(images, labels)


def test_an_npz_with_a_test_part(tmp_path: Path) -> None:
    images, labels = numbered(12)
    put(tmp_path / "a.npz", {"x_train": images[:8], "y_train": labels[:8], "x_test": images[8:], "y_test": labels[8:]})
    pack(tmp_path / "a.npz", tmp_path / "out")
    assert multiset(*everything(tmp_path / "out")["validation"]) == multiset(images[8:], labels[8:])


def test_validation_from_files_of_its_own(tmp_path: Path) -> None:
    images, labels = numbered(12)
    manifest = pack(
        write_npy(tmp_path / "i.npy", images[:8]),
        tmp_path / "out",
        labels=write_npy(tmp_path / "l.npy", labels[:8]),
        validation=write_npy(tmp_path / "vi.npy", images[8:]),
        validation_labels=write_npy(tmp_path / "vl.npy", labels[8:]),
    )
    assert multiset(*everything(tmp_path / "out")["validation"]) == multiset(images[8:], labels[8:])
    assert manifest.source["files"] == ["i.npy", "l.npy", "vi.npy", "vl.npy"]
    command = "deepex data pack i.npy OUT --labels l.npy --validation vi.npy --seed 1 --validation-labels vl.npy"
    assert manifest.source["command"] == command


def test_validation_from_another_source_replaces_a_part_of_the_source(tmp_path: Path) -> None:
    images, labels = numbered(30)
    put(tmp_path / "a.npz", {"x_train": images[:10], "y_train": labels[:10], "x_test": images[10:20], "y_test": labels[10:20]})
    put(tmp_path / "b.npz", {"images": images[20:], "labels": labels[20:]})
    pack(tmp_path / "a.npz", tmp_path / "own", validation=0.5)
    pack(tmp_path / "a.npz", tmp_path / "other", validation=tmp_path / "b.npz")
    assert multiset(*everything(tmp_path / "own")["validation"]) == multiset(images[10:20], labels[10:20])
    assert multiset(*everything(tmp_path / "other")["validation"]) == multiset(images[20:], labels[20:])


def write_images(folder: Path, values: dict[str, list[int]]) -> Path:
    """A folder for each class, with pictures that are of one grey each."""
    for name, greys in values.items():
        (folder / name).mkdir(parents=True)
        for grey in greys:
            Image.new("L", (3, 2), grey).save(folder / name / f"{grey}.png")
    return folder


def write_matrices(folder: Path, values: dict[str, list[int]]) -> Path:
    for name, numbers in values.items():
        (folder / name).mkdir(parents=True)
        for number in numbers:
            np.savetxt(folder / name / f"{number}.txt", np.full((2, 3), number), fmt="%d")
    return folder


def write_list(folder: Path, values: dict[str, list[int]]) -> Path:
    write_images(folder, values)
    lines = [f"{name}/{grey}.png {name}\n" for name, greys in values.items() for grey in greys]
    (folder / "list.txt").write_text("".join(lines))
    return folder / "list.txt"


def labelled(directory: Path, part: str) -> dict[int, str]:
    """The class of each sample by the value that it has everywhere."""
    images, labels = everything(directory)[part]
    classes = load(directory).classes
    return {int(image[0, 0, 0]): classes[int(label)] for image, label in zip(images, labels, strict=True)}


@pytest.mark.parametrize("write", [write_images, write_matrices, write_list])
def test_the_classes_of_a_validation_source_are_found_by_name(tmp_path: Path, write: Callable[..., Path]) -> None:
    train = write(tmp_path / "tr", {"cat": [1, 2], "dog": [3, 4], "emu": [9]})
    manifest = pack(train, tmp_path / "out", validation=write(tmp_path / "va", {"emu": [7], "dog": [5, 6]}))
    assert manifest.classes == ("cat", "dog", "emu")
    assert labelled(tmp_path / "out", "train") == {1: "cat", 2: "cat", 3: "dog", 4: "dog", 9: "emu"}
    assert labelled(tmp_path / "out", "validation") == {5: "dog", 6: "dog", 7: "emu"}
    with pytest.raises(DataError, match="the class cow, which the train samples do not have; they have cat, dog, emu:"):
        pack(train, tmp_path / "no", validation=write(tmp_path / "vb", {"cow": [8], "dog": [5]}))


def test_a_validation_source_of_numbers_keeps_them(tmp_path: Path) -> None:
    train = write_images(tmp_path / "tr", {"cat": [1, 2], "dog": [3]})
    held = write_npy(tmp_path / "v.npy", np.full((2, 2, 3), [[[5]], [[6]]], np.uint8))
    pack(train, tmp_path / "out", validation=held, validation_labels=write_npy(tmp_path / "l.npy", np.array([1, 0])))
    assert labelled(tmp_path / "out", "validation") == {5: "dog", 6: "cat"}


@pytest.mark.parametrize("write", [write_images, write_matrices, write_list])
def test_names_of_classes_number_them_or_rename_them(tmp_path: Path, write: Callable[..., Path]) -> None:
    source = write(tmp_path / "tr", {"cat": [1, 2], "dog": [3, 4]})
    held = write(tmp_path / "va", {"dog": [5]})
    right = {1: "cat", 2: "cat", 3: "dog", 4: "dog"}
    manifest = pack(source, tmp_path / "turned", validation=held, classes=["emu", "dog", "cat"])
    assert manifest.classes == ("emu", "dog", "cat")
    assert labelled(tmp_path / "turned", "train") == right
    assert labelled(tmp_path / "turned", "validation") == {5: "dog"}
    assert "--classes emu,dog,cat" in manifest.source["command"]
    pack(source, tmp_path / "new", validation=held, classes=["Katze", "Hund"])
    assert labelled(tmp_path / "new", "train") == {1: "Katze", 2: "Katze", 3: "Hund", 4: "Hund"}
    assert labelled(tmp_path / "new", "validation") == {5: "Hund"}
    for names, words in (
        (["dog", "Katze"], "without cat of the source's classes cat, dog; give all"),
        (["a", "b", "c"], "gives 3 names, a, b, c, without cat, dog of"),
        (["a"], "gives 1 names, a, without"),
        (["cat", "dog", "cat"], "a name is twice"),
        (["Katze", "Katze"], "a name is twice"),
        (["Katze", ""], "one is missing"),
    ):
        with pytest.raises(DataError, match=words):
            pack(source, tmp_path / "no", classes=names)


def test_names_that_a_source_brings_are_checked_too(tmp_path: Path) -> None:
    train = open_source(write_images(tmp_path / "tr", {"cat": [1, 2], "dog": [3, 4]})).train
    with pytest.raises(DataError, match="a name is twice"):
        class_names(Source(train=train), ("cat", "cat"))


def test_train_and_validation_pictures_have_equally_many_bits(tmp_path: Path) -> None:
    train, held = (write_images(tmp_path / name, {"a": [1, 2, 3]}) for name in ("tr", "va"))
    for path in (train / "a").iterdir():
        Image.fromarray(np.full((2, 3), 300, np.uint16)).save(path)
    with pytest.raises(DataError, match="most train images have 16 bits per value, but most validation images"):
        pack(train, tmp_path / "out", validation=held, dtype="float32")


@pytest.mark.parametrize(
    ("train", "held", "remedy"),
    [
        ((4, 4, 1), (4, 4, 3), "--channels 3"),
        ((4, 4, 3), (4, 4, 4), "convert one"),
        ((4, 4, 1), (5, 4, 1), "resize one"),
        ((4, 4, 1), (4, 5, 3), "resize one"),
    ],
)
def test_what_brings_both_parts_to_one_shape_is_said(tmp_path: Path, train: Any, held: Any, remedy: str) -> None:
    first, second = (
        write_npy(tmp_path / f"{name}.npy", np.zeros((6, *shape), np.uint8)) for name, shape in (("t", train), ("v", held))
    )
    for one, other in ((first, second), (second, first)):
        with pytest.raises(DataError, match=f"they must be equal: {remedy}"):
            pack(one, tmp_path / "no", validation=other)
        if remedy == "--channels 3":
            pack(one, tmp_path / one.stem, validation=other, channels=3)


@pytest.mark.parametrize(
    ("shape", "layout", "expected", "chosen"),
    [
        ((5, 6, 7), None, (1, 6, 7), "NHW"),
        ((5, 6, 7, 3), None, (3, 6, 7), "NHWC"),
        ((5, 3, 6, 7), None, (3, 6, 7), "NCHW"),
        ((5, 3, 6, 4), "NCHW", (3, 6, 4), "NCHW"),
        ((5, 2, 6, 7), "NCHW", (2, 6, 7), "NCHW"),
    ],
)
def test_the_layout_is_found_or_forced_and_stated(
    tmp_path: Path, shape: tuple[int, ...], layout: Any, expected: tuple[int, ...], chosen: str
) -> None:
    images = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    manifest = pack(write_npy(tmp_path / "i.npy", images), tmp_path / "out", validation=0, given_order=True, layout=layout)
    assert manifest.shape == expected
    assert manifest.source["layout"].startswith(chosen)
    packed = everything(tmp_path / "out")["train"][0]
    np.testing.assert_array_equal(packed.transpose(0, 3, 1, 2) if chosen == "NCHW" else packed.reshape(shape), images)


@pytest.mark.parametrize(
    ("dtype", "values", "stored", "scale"),
    [
        (np.uint8, [0, 200], "uint8", (0, 255)),
        (np.uint8, [0, 1], "uint8", (0, 1)),
        (np.bool_, [0, 1], "uint8", (0, 1)),
        (np.int64, [0, 255], "uint8", (0, 255)),
        (np.int16, [-1, 255], "float32", (-1, 255)),
        (np.uint16, [0, 256], "float32", (0, 256)),
        (np.float64, [0.25, 0.5], "float32", (0.25, 0.5)),
        (np.float16, [2, 2], "float32", (2, 4)),
        (np.float32, [2.0**60, 2.0**60], "float32", (2.0**60, 2.0**61)),
    ],
)
def test_stored_type_and_scale(tmp_path: Path, dtype: Any, values: list[float], stored: str, scale: tuple[float, float]) -> None:
    images = np.array(values, dtype).reshape(2, 1, 1)
    manifest = pack(write_npy(tmp_path / "i.npy", images), tmp_path / "out", validation=0, given_order=True)
    assert (manifest.dtype, manifest.scale) == (stored, scale)
    assert everything(tmp_path / "out")["train"][0].reshape(-1).tolist() == values


def test_the_same_seed_packs_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(60)[0])
    first, again, other = (
        pack(source, tmp_path / name, seed=seed, file_bytes=100) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first == again
    assert first.parts != other.parts
    assert len(first.parts["train"].files) > 1


def test_the_given_order_is_kept_when_asked(tmp_path: Path) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(60)[0])
    pack(source, tmp_path / "out", given_order=True, limit=20)
    for images, _ in everything(tmp_path / "out").values():
        assert (np.diff(images[:, 0, 0, 0].astype(int)) > 0).all()
    assert load(tmp_path / "out").order == "given"
    assert load(tmp_path / "out").parts["train"].count == 20


@settings(deadline=None, max_examples=examples(8, 25))
@given(st.lists(st.integers(0, 3), min_size=8, max_size=40), st.integers(1, 50), st.integers(0, 9))
def test_balance_keeps_as_many_of_each_class_as_there_are(
    tmp_path_factory: pytest.TempPathFactory, classes: list[int], limit: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("balance")
    labels = np.array(classes)
    pack(
        write_npy(directory / "i.npy", np.zeros((len(labels), 1, 1), np.uint8)),
        directory / "out",
        labels=write_npy(directory / "l.npy", labels),
        validation=0,
        limit=limit,
        balance=True,
        seed=seed,
    )
    available, kept = Counter(classes), Counter(everything(directory / "out")["train"][1].tolist())
    assert kept.total() == min(limit, len(classes))
    most = max(kept.values())
    assert all(kept[label] >= min(most - 1, available[label]) for label in available)


def test_a_limit_takes_a_fair_draw(tmp_path: Path) -> None:
    labels = write_npy(tmp_path / "l.npy", np.repeat(np.arange(4), 500))
    source = write_npy(tmp_path / "i.npy", np.zeros((2000, 1, 1), np.uint8))
    pack(source, tmp_path / "out", labels=labels, limit=400, validation_limit=40)
    parts = everything(tmp_path / "out")
    assert len(parts["validation"][1]) == 40
    # Of each class about 100 (standard deviation 8); of a source sorted by class the first 400 would all be of one.
    assert all(60 < count < 140 for count in Counter(parts["train"][1].tolist()).values())


@pytest.mark.parametrize("balance", [False, True])
def test_a_limit_takes_a_fair_draw_of_a_validation_part_too(tmp_path: Path, balance: bool) -> None:
    """From files of its own, sorted by class, of which the last has few."""
    images, labels = np.zeros((620, 1, 1), np.uint8), np.repeat(np.arange(4), (200, 200, 200, 20))
    put(tmp_path / "a.npz", {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels})
    pack(tmp_path / "a.npz", tmp_path / "out", validation_limit=80, balance=balance)
    found = np.bincount(everything(tmp_path / "out")["validation"][1], minlength=4)
    assert found.sum() == 80
    assert found.tolist() == [20] * 4 if balance else (found[:3] > 10).all()


def test_the_smallest_share_is_one_sample_and_never_all(tmp_path: Path) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(3)[0])
    for share, held in ((0.01, 1), (0.99, 2)):
        manifest = pack(source, tmp_path / str(held), validation=share)
        assert {name: part.count for name, part in manifest.parts.items()} == {"train": 3 - held, "validation": held}


def test_progress_ends_with_all_samples(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = write_npy(tmp_path / "i.npy", numbered(30)[0])
    pack(source, tmp_path / "out", file_bytes=50, progress=lambda *values: told.append(values))
    assert told == sorted(told)
    assert told[-1] == ("packing", 30, 30)


def test_a_directory_with_files_is_refused_unless_told_to_overwrite(tmp_path: Path) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(30)[0])
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"not of a packed dataset, such as notes\.txt.*--overwrite"):
        pack(source, out)
    pack(source, out, overwrite=True, file_bytes=6)
    with pytest.raises(DataError, match=r"has a packed dataset; .*--overwrite"):
        pack(source, out)
    pack(source, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json",
        "notes.txt",
        "train-00000.npy",
        "validation-00000.npy",
    ]


def test_an_interrupted_packing_is_no_dataset_and_starts_again(tmp_path: Path) -> None:
    source, out = write_npy(tmp_path / "i.npy", numbered(30)[0]), tmp_path / "out"

    def interrupt(_: str, done: int, __: int) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, out, file_bytes=6, progress=interrupt)
    assert list(out.glob("train-*.npy"))
    with pytest.raises(DataError, match="did not finish"):
        load(out)
    pack(source, out)
    assert len(list(out.glob("*.npy"))) == 2
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, overwrite=True, progress=interrupt)
    with pytest.raises(DataError, match="did not finish"):
        load(out)
    pack(source, out)
    assert sum(len(images) for images, _ in everything(out).values()) == 30


def test_a_source_in_the_directory_to_make_is_refused(tmp_path: Path) -> None:
    source = write_npy(tmp_path / "train-00000.npy", numbered(30)[0])
    with pytest.raises(DataError, match="lies in"):
        pack(source, tmp_path, overwrite=True)
    assert source.exists()


def put(path: Path, content: Any) -> None:
    """Bytes as they are, an array as .npy, a table of arrays as .npz, names as a directory of empty files."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, list):
        path.mkdir()
        for name in content:
            (path / name).touch()


IDX = struct.pack(">4I", 0x00000803, 2, 2, 3) + b"\1" * 12
GZ = gzip.compress(IDX)
NAN_FROM_SAMPLE_3 = np.where(np.arange(24) > 13, np.nan, 0).reshape(6, 2, 2)
ZEROS = np.zeros((2, 2, 2))
NPY = b"\x93NUMPY\1\0" + struct.pack("<H", 54) + b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}"[:54]
LONG_DOUBLE = b"\x93NUMPY\1\0" + struct.pack("<H", 56) + b"{'descr': '<f16', 'fortran_order': False, 'shape': (2,)}"

BAD_IMAGES: dict[str, tuple[str, Any, str]] = {
    "missing": ("i.npy", None, r"there is no .*i\.npy"),
    "truncated idx": ("i", IDX[:20], r"i is truncated at offset 20: .*28 bytes.* 20 found"),
    "truncated idx header": ("i", IDX[:9], r"truncated at offset 9: .*16 bytes.* 9 found"),
    "truncated gz": ("i.gz", GZ[:-12], r"i\.gz is truncated at offset \d+: .*28 bytes"),
    "truncated gz header": ("i.gz", GZ[:15], r"i\.gz "),
    "gz without its end": ("i.gz", GZ[:-3], r"truncated at offset 28.*breaks off"),
    "short gz": ("i.gz", gzip.compress(IDX[:20]), r"truncated at offset 20: .*28 bytes.* 20 found"),
    "gz of a wrong sum": ("i.gz", GZ[:-8] + b"\0" * 8, "CRC"),
    "gz damaged": ("i.gz", GZ[:10] + b"\xff" * 20, "is damaged"),
    "idx with more": ("i", IDX + b"more", "goes on at offset 28"),
    "wrong magic": ("i", b"\x12\x34\x56\x78" + IDX[4:], "magic number 0x12345678 at offset 0"),
    "labels as images": ("i", b"\0\0\x08\1\0\0\0\3abc", r"shape \(3,\); images must be \(n, height"),
    "empty file": ("i", b"", "is empty"),
    "no images": ("i.npy", np.zeros((0, 2, 3)), r"no images \(shape \(0, 2, 3\)\)"),
    "nan": ("i.npy", NAN_FROM_SAMPLE_3, "sample 3: has the value nan;"),
    "too large": ("i.npy", np.full((2, 2, 2), 1e300), "sample 0: has the value 1e.300;"),
    "text": ("i.npy", b"hello", r"i\.npy is not an array file"),
    "other text": ("i.txt", b"hello", r"i\.txt"),
    "damaged npy": ("i.npy", NPY, r"i\.npy is not an array file"),
    "npy of version 9": ("i.npy", b"\x93NUMPY\x09\0abc", "version is 9"),
    "objects": ("i.npy", np.array([{}]), "not plain numbers"),
    "complex": ("i.npy", np.zeros((2, 2, 2), complex), r"i\.npy: it holds values of type complex128, not plain .*; convert them"),
    "long double": ("i.npy", LONG_DOUBLE, "values of type .*(float128|f16).*; convert them"),
    "no channels": ("i.npy", np.zeros((2, 5, 6, 7)), "neither end looks like channels"),
    "npz names": ("i.npz", {"pictures": ZEROS, "kinds": ZEROS}, "has the arrays pictures, kinds;"),
    "npz damaged": ("i.npz", b"PK\3\4 and no more", "not a whole array file"),
    "npz objects": ("i.npz", {"images": np.array([{}])}, "not a whole array file"),
    "npz text": ("i.npz", {"images": np.array([[["a"]]])}, "integers or real numbers"),
    "npz half labelled": ("i.npz", {"x_train": ZEROS, "y_train": [0, 0], "x_test": ZEROS}, "without labels"),
    "npz two shapes": ("i.npz", {"x_train": ZEROS, "x_test": np.zeros((2, 3, 3))}, "must be equal"),
    "npz two types": ("i.npz", {"x_train": ZEROS, "x_test": ZEROS.astype(int)}, "both must be integers or both real"),
    "directory": ("d", ["cat.mov"], r"nothing that can be packed; it has cat\.mov"),
    "packed": ("d", ["manifest.json"], "is a packed dataset already"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_images_are_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    name, content, words = BAD_IMAGES[case]
    put(tmp_path / name, content)
    with pytest.raises(DataError, match=words) as caught:
        pack(tmp_path / name, tmp_path / "out", validation=0)
    assert str(tmp_path / name) in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "images.npz")
    with pytest.raises(DataError, match=r"images\.npz is neither a file nor a directory"):
        pack(tmp_path / "images.npz", tmp_path / "out")


def test_values_too_small_to_train_on_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.linspace(0, 1e-40, 6 * 64, dtype=np.float32).reshape(6, 8, 8))
    with pytest.raises(DataError, match="float32, which cannot tell such values"):
        pack(tmp_path / "i.npy", tmp_path / "out", validation=0)


@pytest.mark.parametrize(
    ("labels", "classes", "words"),
    [
        (np.zeros(5, int), None, r"i\.npy has 6 images, but .*l\.npy has 5 labels"),
        (np.array([0, 1, -2, 0, 0, 0]), None, r"l\.npy has the label -2 at sample 2"),
        (np.array([0, 1, 2**64 - 2, 0, 0, 0], np.uint64), None, r"l\.npy has the label 18446744073709551614 at sample 2"),
        (np.zeros(6), None, r"l\.npy has labels of type float64; they must be integers"),
        (np.zeros((6, 10), int), None, r"l\.npy has labels of shape \(6, 10\)"),
        (np.arange(6), ["cat", "dog"], "2 class names were given, but the labels go to 5; give 6 names"),
        (np.arange(6) + 10**9, None, "has the label 1000000005"),
        (None, ["cat"], "1 class names were given, but .* has no labels"),
        (np.arange(6) % 4, ["x", "x", "y", "z"], "the classes are x, x, y, z, where a name is twice; give each class one name"),
        (np.arange(6) % 2, ["", ""], "the classes are '', '', where one is missing; give each class one name"),
        (np.arange(6) % 2, ["cat", " "], "where one is missing"),
        (np.arange(6) % 2, [], "where one is missing"),
    ],
)
def test_bad_labels_are_named_with_what_is_wrong(tmp_path: Path, labels: Any, classes: Any, words: str) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(6)[0])
    given = None if labels is None else write_npy(tmp_path / "l.npy", labels)
    with pytest.raises(DataError, match=words):
        pack(source, tmp_path / "out", labels=given, classes=classes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation": 1.0}, "validation is 1.0"),
        ({"validation": -0.1}, "validation is -0.1"),
        ({"validation": "no.npy"}, r"there is no no\.npy"),
        ({"validation_labels": "l.npy"}, "without validation images"),
        ({"labels": "no.npy"}, r"there is no file no\.npy"),
        ({"seed": -1}, "seed is -1"),
        ({"limit": 0}, "limit is 0"),
        ({"file_bytes": 0}, "file bytes is 0"),
        ({"scale": (1, 1)}, "scale is 1, 1"),
        ({"scale": (0, float("nan"))}, "scale is 0, nan"),
        ({"layout": "NHWC"}, "layout NHWC needs 4 dimensions"),
        ({"balance": True, "limit": 2}, "has no labels, so classes cannot be balanced"),
        ({"balance": True}, "balance was given without a limit, .* --limit or --validation-limit .* or leave --balance out"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(6)[0])
    with pytest.raises(DataError, match=words):
        pack(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("i.npy", {"images": "entry/data"}, r"--images entry/data was given, but has no effect on .*i\.npy"),
        ("i.npy", {"matrix": (2, 3)}, r"--matrix 2x3 was given, .* for matrices as text only"),
        ("i.npy", {"cutoff": 7.0}, r"--cutoff 7\.0 was given, .* for trajectories, with --topology only"),
        ("i.npy", {"periodic": True}, "--periodic was given"),
        ("i.npy", {"convert": True}, r"--convert was given, but has no effect on .*i\.npy: it is for PNG and JPEG files only"),
        ("m.txt", {"max_pixels": 5}, "--max-pixels 5 was given, .* for PNG and JPEG files only"),
        (
            "m.txt",
            {"labels": "l.npy"},
            r"--labels l\.npy was given, but has no effect on .*m\.txt: it is for HDF5, .*; leave it out",
        ),
        ("m.txt", {"layout": "NHW"}, "--layout NHW was given"),
        ("folder", {"labels": "l.npy"}, "--labels"),
        ("folder", {"images": "a"}, "--images"),
        ("list.txt", {"labels": "l.npy"}, "--labels"),
        ("i.npy", {"validation": "folder", "validation_labels": "l.npy"}, r"--validation-labels l\.npy .* no effect on .*folder"),
        ("i.npy", {"validation": "folder", "images": "a"}, "--images"),
    ],
)
def test_an_option_that_has_no_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_npy(tmp_path / "i.npy", numbered(6)[0])
    write_npy(tmp_path / "l.npy", np.arange(6))
    (tmp_path / "m.txt").write_text("1 2\n3 4\n\n5 6\n7 8\n")
    write_list(tmp_path / "folder", {"a": [1], "b": [2]}).rename(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("folder/a/1.png a\nfolder/b/2.png b\n")
    with pytest.raises(DataError, match=words):
        pack(name, "out", **options)
    assert not (tmp_path / "out").exists()


def test_options_of_one_kind_of_source_may_stand_beside_a_source_of_another(tmp_path: Path) -> None:
    images, labels = numbered(6)[0], np.arange(6) % 2
    put(tmp_path / "a.npz", {"frames": images, "kinds": labels})
    held = write_images(tmp_path / "va", {"a": [1], "b": [2]})
    pack(tmp_path / "a.npz", tmp_path / "out", images="frames", labels="kinds", validation=held)
    options: dict[str, Any] = {"images": "frames", "convert": True, "max_pixels": 6}
    pack(held, tmp_path / "turned", **options, validation=tmp_path / "a.npz", validation_labels="kinds")
    assert multiset(*everything(tmp_path / "turned")["validation"]) == multiset(images, labels)


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        ([1, 2, 3, 1], "1 of 4 have no train sample: 0"),
        ([0, 0, 40, 0], "39 of 41 have no train sample: 1, 2, 3, 4, 5, 6, 7, 8 and 31 more"),
        ([0, 1, 1, 2], None),
    ],
)
def test_classes_without_a_train_sample_are_noted(tmp_path: Path, labels: list[int], note: str | None) -> None:
    source = write_npy(tmp_path / "i.npy", numbered(4)[0])
    given = write_npy(tmp_path / "l.npy", np.array(labels))
    assert pack(source, tmp_path / "out", labels=given, validation=0, file_bytes=12).source.get("empty_classes") == note


def test_a_class_that_was_left_out_whole_is_noted(tmp_path: Path) -> None:
    source = write_images(tmp_path / "tr", {"cat": [1, 2], "dog": [3, 4, 5]})
    for path in (source / "cat").iterdir():
        path.write_bytes(b"")
    manifest = pack(source, tmp_path / "out", validation=0, skip_bad=True)
    assert manifest.source["empty_classes"] == "1 of 2 have no train sample: cat"


def test_the_shipped_sample_is_whole_and_balanced() -> None:
    dataset = PackedDataset.open(SAMPLE)
    assert dataset.verify() == []
    for name, per_class in (("train", 600), ("validation", 200)):
        part = dataset.part(name)
        assert np.bincount(part.read(0, part.count)[1]).tolist() == [per_class] * 10
        # Any contiguous shard is fair, because the order was drawn: 50 ± 7 of each class in a twelfth of train.
        assert np.bincount(part.read(0, part.count // 12)[1], minlength=10).min() > part.count / 120 / 2
    assert "MIT" in dataset.manifest.source["license"]
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) < 7e6
    assert all(str(path) not in (SAMPLE / "manifest.json").read_text() for path in (Path.home(), Path.cwd(), "/usr"))


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_command_packs_describes_and_verifies(tmp_path: Path) -> None:
    images, labels = numbered(40)
    source, out = write_npy(tmp_path / "i.npy", images), tmp_path / "out"
    (tmp_path / "names.txt").write_text("a\nb\nc\n[d]\n")
    options = ["--labels", write_npy(tmp_path / "l.npy", labels), "--validation", 0.25, "--limit", 8, "--balance"]
    shown = run("pack", source, out, *options, "--classes", f"@{tmp_path / 'names.txt'}", "--scale", 0, 100, "--name", "my")
    assert "8 images" in shown
    assert "[d]" in shown
    manifest = json.loads(run("info", out, "--json"))
    assert manifest["classes"] == ["a", "b", "c", "[d]"]
    assert manifest["scale"] == [0, 100]
    assert manifest["parts"]["validation"]["count"] == 10
    assert "my in" in run("info", out)
    assert "4 of 4 files are whole" in run("verify", out)
    assert json.loads(run("verify", out, "--json"))["bad"] == []


def test_a_file_of_names_may_begin_with_the_mark_of_windows(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("zero\none\n", encoding="utf-8-sig")
    source, labels = write_npy(tmp_path / "i.npy", numbered(6)[0]), write_npy(tmp_path / "l.npy", np.arange(6) % 2)
    run("pack", source, tmp_path / "out", "--labels", labels, "--classes", f"@{tmp_path / 'names.txt'}")
    assert load(tmp_path / "out").classes == ("zero", "one")


def test_the_recorded_command_packs_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = numbered(40, (3, 2, 2))
    monkeypatch.chdir(tmp_path)
    write_npy(tmp_path / "i.npy", images)
    run(
        "pack",
        "i.npy",
        "a",
        "--given-order",
        "--limit",
        5,
        "--validation",
        0.2,
        "--layout",
        "NCHW",
        "--seed",
        3,
        "--scale",
        0,
        9,
    )
    words = load("a").source["command"].replace("OUT", "b").split()
    assert words[:3] == ["deepex", "data", "pack"]
    run(*words[2:])
    assert load("b") == load("a")


def test_verify_ends_with_2_and_names_every_bad_file(tmp_path: Path) -> None:
    pack(write_npy(tmp_path / "i.npy", numbered(40)[0]), tmp_path / "out", file_bytes=60)
    for name in ("train-00001.npy", "validation-00000.npy"):
        path = tmp_path / "out" / name
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    shown = run("verify", tmp_path / "out", code=2)
    assert "train-00001.npy was changed" in shown
    assert "validation-00000.npy was changed" in shown
    assert "train-00000.npy" not in shown
    assert len(json.loads(run("verify", tmp_path / "out", "--json", code=2))["bad"]) == 2


def test_a_users_mistake_is_left_to_the_entry_point(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert isinstance(result.exception, DataError)
    result = CliRunner().invoke(app, ["pack", str(tmp_path), str(tmp_path / "out"), "--classes", "@nothing"])
    assert isinstance(result.exception, DataError)
    assert "@nothing" in str(result.exception)


@pytest.mark.parametrize("verb", ["pack", "make", "info", "verify"])
def test_help_has_an_example(verb: str) -> None:
    assert f"Example: deepex data {verb}" in run(verb, "--help")


def test_help_says_what_is_replaced() -> None:
    said = {verb: " ".join(run(verb, "--help").split()) for verb in ("pack", "make")}
    assert "or another source, which replaces that part" in said["pack"]
    for text in said.values():
        assert "the old one is removed when the new one is begun" in text


@pytest.mark.parametrize("kind", ["npz", "gz", "mnist"])
@pytest.mark.parametrize("shape", [(40, 6, 5), (40, 3, 6, 5)])
def test_arrays_too_large_for_memory_are_streamed(
    kind: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered for the test; what is packed is the same as from memory."""
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    labels = np.arange(40) % 3
    options: dict[str, Any] = {}
    if kind == "npz":
        source = tmp_path / "a.npz"
        np.savez_compressed(source, x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    else:
        source = tmp_path / "mnist"
        source.mkdir()
        names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
        write_idx(source / names[0], images, 0x08)
        write_idx(source / names[1], labels.astype(np.uint8), 0x08)
        if kind == "gz":
            source, options = source / names[0], {"labels": source / names[1]}
    pack(source, tmp_path / "memory", **options)
    monkeypatch.setattr(stream, "MOST_BYTES", 100)
    monkeypatch.setattr(stream, "_BLOCK_BYTES", 200)
    pack(source, tmp_path / "stream", file_bytes=300, **options)
    found = {name: everything(tmp_path / name) for name in ("memory", "stream")}
    for part in found["memory"]:
        assert multiset(*found["memory"][part]) == multiset(*found["stream"][part])
    data = bytearray(source.read_bytes() if source.is_file() else (source / names[0]).read_bytes())
    data[len(data) // 3] ^= 255
    (source if source.is_file() else source / names[0]).write_bytes(data)
    with pytest.raises(DataError):
        pack(source, tmp_path / "damaged", **options)
