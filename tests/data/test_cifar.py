"""The binary versions of CIFAR, written here byte by byte as their page describes them."""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepex.data.source.base import Images
from deepex.data.source.cifar import open_cifar
from deepex.errors import DataError
from tests.full import examples

NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES_10 = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def picture(number: int) -> NDArray[np.uint8]:
    """(32, 32, 3), different for each number."""
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def record(number: int, *labels: int) -> bytes:
    """The labels, then row by row the red, the green and the blue plane."""
    return bytes(labels) + b"".join(picture(number)[:, :, channel].tobytes() for channel in range(3))


def write_10(folder: Path, each: int = 3) -> Path:
    for file, name in enumerate(FILES_10):
        (folder / name).write_bytes(b"".join(record(each * file + n, (each * file + n) % 10) for n in range(each)))
    (folder / "batches.meta.txt").write_text("\n".join(NAMES_10) + "\n\n")
    return folder


def write_100(folder: Path) -> Path:
    (folder / "train.bin").write_bytes(b"".join(record(n, n % 20, 99 - n) for n in range(7)))
    (folder / "test.bin").write_bytes(b"".join(record(n, n % 20, n) for n in range(7, 12)))
    (folder / "fine_label_names.txt").write_text("\n".join(f"class {n}" for n in range(100)))
    (folder / "coarse_label_names.txt").write_text("\n".join(f"group {n}" for n in range(20)))
    return folder


def read(images: Images, numbers: NDArray[np.int64]) -> NDArray[Any]:
    out = np.empty((len(numbers), *images.shape), images.dtype)
    assert images.read(numbers, out) == []
    return out


@settings(deadline=None, max_examples=examples(8, 25))
@given(st.data())
def test_cifar_10_is_read_as_written(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_10(tmp_path_factory.mktemp("cifar"))
    source = open_cifar(folder)
    assert source.classes == NAMES_10
    assert source.validation is not None
    for part, first, count in ((source.train, 0, 15), (source.validation, 15, 3)):
        assert part.labels is not None
        assert (part.count, part.shape, part.dtype) == (count, (32, 32, 3), np.dtype(np.uint8))
        assert part.labels.tolist() == [n % 10 for n in range(first, first + count)]
        numbers = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1)))), np.int64)
        for row, number in zip(read(pickle.loads(pickle.dumps(part)), numbers), numbers, strict=True):
            np.testing.assert_array_equal(row, picture(first + int(number)))
    assert source.train.name(7) == f"{folder / 'data_batch_3.bin'} record 1"


def test_cifar_100_has_the_fine_labels(tmp_path: Path) -> None:
    source = open_cifar(write_100(tmp_path))
    assert source.validation is not None
    assert source.train.labels is not None
    assert source.classes is not None
    assert source.train.labels.tolist() == [99, 98, 97, 96, 95, 94, 93]
    assert (len(source.classes), source.classes[99]) == (100, "class 99")
    np.testing.assert_array_equal(read(source.validation, np.array([4]))[0], picture(11))


def test_without_a_file_of_names_the_classes_are_numbered(tmp_path: Path) -> None:
    write_10(tmp_path)
    (tmp_path / "batches.meta.txt").unlink()
    assert open_cifar(tmp_path).classes is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data_batch_2.bin", record(1, 3)[:-1], r"data_batch_2.bin has 3072 bytes, which is not a multiple of a record of 3073"),
        ("data_batch_2.bin", b"", "0 bytes"),
        ("data_batch_2.bin", record(1, 3) + record(1, 10), "label 10 in record 1; labels here are 0 to 9"),
        ("data_batch_4.bin", None, r"has no data_batch_4\.bin"),
        ("test_batch.bin", None, r"has no test_batch\.bin"),
        ("batches.meta.txt", b"cat\ndog\n", "2 different names"),
        ("batches.meta.txt", b"\xff" * 20, "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    write_10(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        open_cifar(tmp_path)


def test_a_wrong_coarse_label_is_damage_too(tmp_path: Path) -> None:
    write_100(tmp_path)
    (tmp_path / "test.bin").write_bytes(record(0, 20, 3))
    with pytest.raises(DataError, match="label 20 in record 0; labels here are 0 to 19"):
        open_cifar(tmp_path)


def test_archives_and_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    (tmp_path / "inner").mkdir()
    with tarfile.open(archive, "w:gz") as file:
        file.add(write_10(tmp_path / "inner"), "cifar-10-batches-bin")
    for path in (archive, tmp_path):
        with pytest.raises(DataError, match="unpack it first"):
            open_cifar(path)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "data_batch_1").write_bytes(pickle.dumps({b"data": 1}))
    with pytest.raises(DataError, match=r"unpickling runs whatever code .* binary version"):
        open_cifar(tmp_path / "python")
    with pytest.raises(DataError, match="cannot be read"):
        open_cifar(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a file; give the folder"):
        open_cifar(tmp_path / "inner" / "test_batch.bin")


def test_a_file_that_changed_is_not_mapped(tmp_path: Path) -> None:
    source = open_cifar(write_10(tmp_path))
    copy = pickle.loads(pickle.dumps(source.train))
    (tmp_path / "data_batch_1.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="has changed: it now has 5 bytes"):
        read(copy, np.array([0]))


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.data())
def test_damaged_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_10(tmp_path_factory.mktemp("cifar"))
    path = folder / data.draw(st.sampled_from(sorted(entry.name for entry in folder.iterdir())))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1) | st.sampled_from((0, len(raw) // 3)))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)) | st.just(len(raw) // 3))])
    try:
        source = open_cifar(folder)
    except DataError:
        return
    assert source.train.labels is not None
    assert read(source.train, np.arange(source.train.count)).shape == (len(source.train.labels), 32, 32, 3)
    assert source.train.labels.max() < 10
