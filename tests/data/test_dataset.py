import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.npy import write_npy
from deepex.data.pack import pack
from deepex.errors import DataError
from tests.full import examples

COUNT = 23


@pytest.fixture(scope="module", params=[1, 3, 7, 100], ids=lambda n: f"{n}-per-file")
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 float images in files of `param` samples each: image k is k everywhere, its label is k % 5."""
    return make(tmp_path_factory.mktemp("packed"), per_file=request.param)


def make(directory: Path, *, per_file: int = 7, labelled: bool = True) -> Path:
    images = np.broadcast_to(np.arange(COUNT, dtype=np.float32)[:, None, None, None], (COUNT, 2, 3, 1))
    np.save(directory / "images.npy", images)
    np.save(directory / "labels.npy", np.arange(COUNT) % 5)
    pack(
        directory / "images.npy",
        directory / "out",
        labels=directory / "labels.npy" if labelled else None,
        validation=0,
        given_order=True,
        file_bytes=per_file * 24,
    )
    return directory / "out"


def empty(part: PackedPart, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return np.full((count, *part.sample_shape), -1, part.dtype), np.full(count, -1, np.int64)


def assert_samples(images: NDArray[np.float32], labels: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    expected = np.broadcast_to(numbers[:, None, None, None], images.shape)
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, numbers % 5)


bounds = st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)).map(sorted)


@settings(deadline=None, max_examples=examples(8, 25))
@given(bounds)
def test_read_gives_fresh_arrays_of_any_range(packed: Path, bounds: list[int]) -> None:
    start, stop = bounds
    images, labels = PackedDataset.open(packed).part("train").read(start, stop)
    assert images.flags.c_contiguous
    assert images.flags.owndata
    assert labels.dtype == np.int64
    assert_samples(images, labels, np.arange(start, stop))


@settings(deadline=None, max_examples=examples(8, 25))
@given(bounds)
def test_read_into_fills_given_arrays_contiguous_or_not(packed: Path, bounds: list[int]) -> None:
    start, stop = bounds
    part = PackedDataset.open(packed).part("train")
    images, labels = empty(part, 2 * (stop - start))
    part.read_into(start, stop, images[::2], labels[::2])
    assert_samples(images[::2], labels[::2], np.arange(start, stop))
    assert (images[1::2] == -1).all()
    part.read_into(start, stop, images[: stop - start], labels[: stop - start])
    assert_samples(images[: stop - start], labels[: stop - start], np.arange(start, stop))


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.lists(st.integers(0, COUNT - 1), max_size=40), st.booleans())
def test_gather_gives_the_samples_at_any_indices(packed: Path, numbers: list[int], strided: bool) -> None:
    part = PackedDataset.open(packed).part("train")
    indices = np.array(numbers, np.int64)
    images, labels = empty(part, 2 * len(indices))
    step = 2 if strided else 1
    into = slice(None, step * len(indices), step)
    part.gather(indices, images[into], labels[into])
    assert_samples(images[into], labels[into], indices)


def test_gather_equals_read(packed: Path) -> None:
    part = PackedDataset.open(packed).part("train")
    images, labels = empty(part, 12)
    part.gather(np.arange(5, 17), images, labels)
    for gathered, read in zip((images, labels), part.read(5, 17), strict=True):
        np.testing.assert_array_equal(gathered, read)


def test_without_labels_zeros_are_given(tmp_path: Path) -> None:
    part = PackedDataset.open(make(tmp_path, labelled=False)).part("train")
    assert not part.read(0, COUNT)[1].any()
    images, labels = empty(part, 3)
    part.gather(np.array([20, 0, 9]), images, labels)
    assert labels.tolist() == [0, 0, 0]
    assert images[:, 0, 0, 0].tolist() == [20, 0, 9]


def test_files_are_opened_when_first_touched_and_kept(tmp_path: Path) -> None:
    directory = make(tmp_path)
    part = PackedDataset.open(directory).part("train")
    (directory / "train-00003.npy").unlink()
    part.read(0, 21)
    assert part.open_images(part.packed.files[0]) is part.open_images(part.packed.files[0])
    with pytest.raises(DataError, match=r"train-00003\.npy is missing"):
        part.read(20, 22)


def test_a_missing_part_lists_the_parts_there_are(packed: Path) -> None:
    with pytest.raises(DataError, match=r"no part 'test'; it has: train"):
        PackedDataset.open(packed).part("test")


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, COUNT + 1)])
def test_a_range_outside_the_part_is_refused(packed: Path, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"samples {start} up to {stop}"):
        PackedDataset.open(packed).part("train").read(start, stop)


@pytest.mark.parametrize("index", [-1, COUNT])
def test_an_index_outside_the_part_is_refused(packed: Path, index: int) -> None:
    part = PackedDataset.open(packed).part("train")
    with pytest.raises(IndexError, match=rf"{index}.*0 to {COUNT - 1}"):
        part.gather(np.array([0, index]), *empty(part, 2))


def test_arrays_that_do_not_fit_are_refused(packed: Path) -> None:
    part = PackedDataset.open(packed).part("train")
    images, labels = empty(part, 2)
    with pytest.raises(ValueError, match="images_out is float64"):
        part.gather(np.array([0, 1]), images.astype(np.float64), labels)
    with pytest.raises(ValueError, match=r"labels_out is int64 of shape \(1,\)"):
        part.read_into(0, 2, images, labels[:1])


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    directory = make(tmp_path)
    path = directory / "train-00001.npy"
    size = path.stat().st_size
    os.truncate(path, size - 5)
    part = PackedDataset.open(directory).part("train")
    part.read(0, 7)
    with pytest.raises(DataError, match=rf"train-00001\.npy is truncated: it has {size - 5} bytes.*needs {size}"):
        part.read(0, 8)
    with pytest.raises(DataError, match=rf"train-00001\.npy is truncated: it has {size - 5} bytes"):
        part.gather(np.array([8]), *empty(part, 1))


def test_a_file_cut_while_in_use_is_named(tmp_path: Path) -> None:
    directory = make(tmp_path)
    part = PackedDataset.open(directory).part("train")
    part.read(0, 7)
    os.truncate(directory / "train-00000.npy", 140)
    with pytest.raises(DataError, match=r"train-00000\.npy ends at offset 140; 156 more bytes were expected"):
        part.read(0, 7)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((7, 3, 2, 1), np.float32), r"float32 of shape \(7, 3, 2, 1\)"),
        (np.zeros((7, 2, 3, 1), np.int32), r"int32 of shape \(7, 2, 3, 1\)"),
        (np.zeros((7, 2, 3, 1), np.float32, order="F"), "in Fortran order"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, array: NDArray[np.float32], found: str) -> None:
    directory = make(tmp_path)
    np.save(directory / "train-00002.npy", array)
    dataset = PackedDataset.open(directory)
    with pytest.raises(DataError, match=rf"train-00002\.npy holds {found}|{found}.*float32 of shape \(7, 2, 3, 1\)"):
        dataset.part("train").read(14, 15)
    (message,) = dataset.verify()
    assert "train-00002.npy" in message


def test_a_label_that_is_no_class_is_named(tmp_path: Path) -> None:
    directory = make(tmp_path)
    write_npy(directory / "train-00000-labels.npy", np.array([0, 1, 2, 3, 4, 5, 0]))
    with pytest.raises(DataError, match=r"train-00000-labels\.npy has labels from 0 to 5; they must be from 0 to 4"):
        PackedDataset.open(directory).part("train").read(0, 1)


def test_verify_is_content_with_a_whole_dataset(packed: Path) -> None:
    blocks: list[int] = []
    assert PackedDataset.open(packed).verify(progress=blocks.append) == []
    assert sum(blocks) == sum(path.stat().st_size for path in packed.glob("*.npy"))


@settings(deadline=None, max_examples=examples(6, 12))
@given(st.data())
def test_a_flipped_byte_anywhere_is_found_by_exactly_one_rank(packed: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(packed.glob("*.npy"))))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    size = data.draw(st.integers(1, 4))
    try:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
        messages = [PackedDataset.open(packed).verify(rank, size) for rank in range(size)]
    finally:
        path.write_bytes(whole)
    assert sorted(map(len, messages)) == [0] * (size - 1) + [1]
    assert path.name in next(filter(None, messages))[0]


def test_verify_names_every_bad_file(tmp_path: Path) -> None:
    directory = make(tmp_path)
    (directory / "train-00000.npy").unlink()
    os.truncate(directory / "train-00001.npy", 30)
    (directory / "train-00002-labels.npy").write_bytes(b"")
    messages = PackedDataset.open(directory).verify()
    names = ["train-00000.npy", "train-00001.npy", "train-00002-labels.npy"]
    assert len(messages) == 3
    for name, message in zip(names, messages, strict=True):
        assert name in message


def test_more_files_than_may_be_open_are_mapped_in_turn(tmp_path: Path) -> None:
    """Each map holds a file descriptor, of which a process has 1,024 as a rule."""
    np.savez(tmp_path / "i.npz", images=np.arange(240, dtype=np.uint8).reshape(60, 2, 2), labels=np.arange(60) % 4)
    pack(tmp_path / "i.npz", tmp_path / "out", validation=0, file_bytes=4)
    part = PackedDataset.open(tmp_path / "out").part("train")
    assert len(part.packed.files) == 60
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    assert held + 36 < 2 * 60, "else all could be open"
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * held + 36, before[1]))  # half is for maps, a quarter each of images and labels
    try:
        images, labels = np.empty((60, 2, 2, 1), np.uint8), np.empty(60, np.int64)
        part.gather(np.arange(60), images, labels)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted(images[:, 0, 0, 0].tolist()) == list(range(0, 240, 4))
    assert (labels == images[:, 0, 0, 0] // 4 % 4).all()
