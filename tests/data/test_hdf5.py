"""HDF5 as a source: files written by h5py in every storage that it offers."""

import fcntl
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deepex.data.source import hdf5
from deepex.data.source.hdf5 import Hdf5Images, open_hdf5
from deepex.data.source.layout import AxisOrder
from deepex.errors import DataError
from tests.full import examples

Array = NDArray[Any]
DTYPES = ("u1", "i1", "?", "<u2", ">i2", "<i4", ">u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8")
STORAGE: tuple[dict[str, Any], ...] = (
    {},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf"},
    {"fletcher32": True},
)


def opened(*paths: Path, images: str | None = None, labels: str | None = None, layout: AxisOrder | None = None) -> Hdf5Images:
    train = open_hdf5(paths, images=images, labels=labels, layout=layout).train
    assert isinstance(train, Hdf5Images)
    return train


def read(images: Hdf5Images, numbers: Array) -> Array:
    out = np.empty((len(numbers), *images.shape), images.dtype)
    assert images.read(numbers, out) == []
    return out


def sample(count: int = 40, shape: tuple[int, ...] = (4, 5)) -> Array:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def write(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for key, values in datasets.items():
            file[key.replace("__", "/")] = values
    return path


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.data())
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    layout: AxisOrder = data.draw(st.sampled_from(("NHW", "NHWC", "NCHW")))
    row = tuple(data.draw(st.lists(st.integers(1, 5), min_size=len(layout) - 1, max_size=len(layout) - 1)))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    options = data.draw(st.sampled_from(STORAGE))
    arrays = []
    for number in range(data.draw(st.integers(1, 3))):
        array = data.draw(hnp.arrays(dtype, (data.draw(st.integers(1, 20)), *row)))
        chunks = (
            None if not options and data.draw(st.booleans()) else tuple(data.draw(st.integers(1, size)) for size in array.shape)
        )
        with h5py.File(folder / f"{number}.h5", "w", libver=data.draw(st.sampled_from(("earliest", "latest")))) as file:
            file.create_dataset("deep/down/frames", data=array, chunks=chunks, **options)
        arrays.append(array)
    whole = np.concatenate(arrays).astype(dtype.newbyteorder("="))
    whole = {"NHW": whole[..., None], "NHWC": whole, "NCHW": np.moveaxis(whole, 1, -1)}[layout]
    images = opened(*folder.iterdir(), images="deep/down/frames", layout=layout)
    assert (images.count, images.shape, images.dtype) == (len(whole), whole.shape[1:], whole.dtype)
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, len(whole) - 1)))), np.int64)
    most, gap = data.draw(st.sampled_from((1, 64, 500, 1 << 25))), data.draw(st.sampled_from((0, 30, 1 << 16)))
    with mock.patch.multiple(hdf5, _MOST_BYTES=most, _GAP_BYTES=gap):
        np.testing.assert_array_equal(read(images, numbers), whole[numbers])
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
        out = np.empty((stop - start, *images.shape), images.dtype)
        assert images.read_rows(start, stop, out) == []
        np.testing.assert_array_equal(out, whole[start:stop])
    images.close()


def test_rows_go_straight_into_the_output(tmp_path: Path) -> None:
    images = opened(write(tmp_path / "a.h5", images=sample()))
    out = np.zeros((10, 4, 5, 1), np.uint8)
    with mock.patch.object(np, "empty", side_effect=AssertionError("a copy was made")):
        assert images.read_rows(3, 13, out) == []
    np.testing.assert_array_equal(out[..., 0], sample()[3:13])


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train__images", "train__labels", "validation__images", "validation__labels"),
        ("train__data", "train__labels", "test__data", "test__labels"),
        ("images", "labels"),
        ("data", "label"),
        ("data", "labels"),
        ("strange__name",),
    ],
)
def test_usual_names_are_found(tmp_path: Path, names: tuple[str, ...]) -> None:
    values = (sample(7), np.arange(7)[:, None], sample(5), np.arange(5, dtype=np.uint8))
    source = open_hdf5(
        [write(tmp_path / "a.h5", note=3, **dict(zip(names, values, strict=False)))], images=None, labels=None, layout=None
    )
    for part, images, labels in ((source.train, *values[:2]), (source.validation, *values[2:]))[: max(1, len(names) // 2)]:
        assert isinstance(part, Hdf5Images)
        np.testing.assert_array_equal(read(part, np.arange(part.count))[..., 0], images)
        assert (part.labels is None) == (len(names) == 1)
        assert part.labels is None or part.labels.tolist() == labels.ravel().tolist()
    assert (source.validation is None) == (len(names) < 4)


def test_the_layout_is_guessed_as_for_arrays(tmp_path: Path) -> None:
    assert opened(write(tmp_path / "a.h5", images=sample(9, (6, 5, 3)))).shape == (6, 5, 3)
    assert opened(write(tmp_path / "b.h5", images=sample(9, (3, 6, 5)))).shape == (6, 5, 3)
    with pytest.raises(DataError, match="--layout"):
        opened(write(tmp_path / "c.h5", images=sample(9, (5, 6, 5))))


def test_unclear_images_are_listed_with_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", first=sample(3), second__one=sample(4), note=1)
    with pytest.raises(DataError, match=r"2 datasets.*first \(3, 4, 5\).*second/one \(4, 4, 5\).*--images"):
        opened(path)
    with pytest.raises(DataError, match=r"no dataset thrid.*first \(3, 4, 5\)"):
        opened(path, images="thrid")
    with pytest.raises(DataError, match=r"a group second, not a dataset; in it are second/one"):
        opened(path, images="second")


def test_many_files_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    arrays = [sample(n) for n in (3, 8, 5)]
    paths = [write(tmp_path / f"{n}.h5", images=a, labels=np.full(len(a), n)) for n, a in enumerate(arrays)]
    images = opened(*reversed(paths))
    np.testing.assert_array_equal(read(images, np.arange(16))[..., 0], np.concatenate(arrays))
    assert images.labels is not None
    assert images.labels.tolist() == [0] * 3 + [1] * 8 + [2] * 5
    assert images.name(4) == f"{paths[1]} images[1]"
    assert images.description["files"] == ["0.h5", "1.h5", "2.h5"]


def test_the_odd_file_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.h5", images=sample(3))
    for odd in (sample(3, (4, 6)), sample(3).astype(np.float32)):
        with pytest.raises(DataError, match=r"b\.h5 has images of shape .* must agree"):
            opened(first, write(tmp_path / "b.h5", images=odd))
    with pytest.raises(DataError, match=r"c\.h5 has no dataset images"):
        opened(first, write(tmp_path / "c.h5", pictures=sample(3)))
    with pytest.raises(DataError, match=r"d\.h5 is missing"):
        opened(first, tmp_path / "d.h5")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.arange(39), "40 images in images, but 39 labels"),
        (np.arange(40) - 1, "label -1 at sample 0"),
        (np.zeros((40, 10), np.int64), r"labels of shape \(40, 10\)"),
        (np.zeros((40, 1, 1), np.int64), r"labels of shape \(40, 1, 1\)"),
        (np.zeros(40), "labels of type float64"),
        (np.full(40, 2**63, np.uint64), "label 9223372036854775808"),
        (np.array([b"cat"] * 40), "text or references"),
    ],
)
def test_bad_labels_are_named(tmp_path: Path, labels: Array, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        opened(write(tmp_path / "a.h5", images=sample(), labels=labels))


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3, 4, 5), "u1")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "images", (3, 4, 5))
    file.create_virtual_dataset("images", layout)


def half_written(file: h5py.File) -> None:
    file.create_dataset("images", (3, 4, 5), "u1", chunks=(1, 4, 5))[1] = 7


def unknown_filter(file: h5py.File) -> None:
    settings_ = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings_.set_chunk((3, 4, 5))
    settings_.set_filter(307, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple((3, 4, 5))
    h5py.Dataset(h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, space, settings_))[:] = 1


REFUSED: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "compound": (lambda f: f.create_dataset("images", (3, 4, 5), [("a", "u1"), ("b", "f4")]), r"compound values \(a, b\)"),
    "text": (lambda f: f.create_dataset("images", (3, 4, 5), h5py.string_dtype()), "text or references"),
    "references": (lambda f: f.create_dataset("images", (3, 4, 5), h5py.ref_dtype), "text or references"),
    "complex": (lambda f: f.create_dataset("images", data=np.zeros((3, 4, 5), complex)), "complex128"),
    "no rows": (lambda f: f.create_dataset("images", (0, 4, 5), "u1"), r"no samples \(shape \(0, 4, 5\)\)"),
    "scalar": (lambda f: f.create_dataset("images", data=3), r"no samples \(shape \(\)\)"),
    "null": (lambda f: f.create_dataset("images", data=h5py.Empty("u1")), "no samples"),
    "two dimensions": (lambda f: f.create_dataset("images", data=np.zeros((3, 4))), r"shape \(3, 4\)"),
    "never written": (lambda f: f.create_dataset("images", (3, 4, 5), "u1"), "only 0 are there"),
    "half written": (half_written, "1 of its 3 chunks"),
    "virtual": (virtual, "view of other files"),
    "raw file": (lambda f: f.create_dataset("images", data=sample(3), external=[("raw.bin", 0, 60)]), "view of other files"),
    "link to nowhere": (
        lambda f: f.__setitem__("images", h5py.ExternalLink("elsewhere.h5", "/images")),
        "only a link to elsewhere.h5",
    ),
    "link out": (lambda f: f.__setitem__("images", h5py.ExternalLink("other.h5", "/images")), r"in another file, .*other\.h5"),
    "dangling": (lambda f: f.__setitem__("images", h5py.SoftLink("/gone")), "no dataset images"),
    "unknown filter": (unknown_filter, r"filter 307 .*h5repack"),
    "giant chunk": (
        lambda f: f.create_dataset("images", (1, 40_000, 40_000), "u1", compression=1, chunks=(1, 40_000, 40_000)),
        "chunks",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # raw storage and links are found from here
    write(tmp_path / "other.h5", images=sample(3))
    make, reason = REFUSED[kind]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    with pytest.raises(DataError, match=reason) as caught:
        opened(tmp_path / "a.h5", images="images")
    assert "a.h5" in str(caught.value)


def test_a_compressed_chunk_that_is_too_large_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("images", (1, 40_000, 40_000), "u1", compression=1, chunks=(1, 40_000, 40_000))
        data.id.write_direct_chunk((0, 0, 0), b"x")
    with pytest.raises(DataError, match=r"1600000000 bytes are unpacked .* the limit is 1073741824"):
        opened(tmp_path / "a.h5")


def test_a_damaged_chunk_costs_its_own_rows_only(tmp_path: Path) -> None:
    array = sample(100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=array, chunks=(10, 4, 5), compression="gzip")
        info = [file["images"].id.get_chunk_info(n) for n in range(10)]
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    for number in (3, 7):
        raw[info[number].byte_offset : info[number].byte_offset + 8] = b"\xff" * 8
    (tmp_path / "a.h5").write_bytes(raw)
    images = opened(tmp_path / "a.h5")
    numbers = np.arange(5, 100, 2)
    out = np.empty((len(numbers), *images.shape), images.dtype)
    bad = images.read(numbers, out)
    hurt = np.isin(numbers // 10, (3, 7))
    assert [entry.place for entry in bad] == np.flatnonzero(hurt).tolist()
    assert bad[0].name == f"{tmp_path / 'a.h5'} images[31]"
    assert "filter returned failure" in bad[0].reason
    np.testing.assert_array_equal(out[~hurt, ..., 0], array[numbers[~hurt]])


def test_a_chunk_shorter_than_its_checksum_is_refused(tmp_path: Path) -> None:
    """The library would end the process: HDFGroup/hdf5 issue 6488."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("images", (3, 4, 5), "u1", chunks=(3, 4, 5), fletcher32=True)
        data.id.write_direct_chunk((0, 0, 0), b"xy")
    with pytest.raises(DataError, match="compression does not fit its chunks"):
        opened(tmp_path / "a.h5")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.h5", images=sample(), labels=np.arange(40)).read_bytes()
    for size in (0, 7, 100, 700, len(raw) // 2, len(raw) - 1):
        (tmp_path / "b.h5").write_bytes(raw[:size])
        with pytest.raises(DataError, match=r"b\.h5 cannot be read as HDF5"):
            opened(tmp_path / "b.h5")


def test_a_copy_works_elsewhere_and_files_are_given_back(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images=sample())
    images = opened(path)
    h5py.File(path, "r+").close()  # opening the source left nothing open
    expected = read(images, np.arange(40))
    copy = pickle.loads(pickle.dumps(images))
    with pytest.raises(OSError, match="already open"):
        h5py.File(path, "r+")
    images.close()
    h5py.File(path, "r+").close()
    np.testing.assert_array_equal(read(copy, np.arange(40)), expected)
    copy.close()
    write(path, images=sample(41))
    with pytest.raises(DataError, match=r"has changed: images is now uint8 of shape \(41, 4, 5\)"):
        read(images, np.arange(40))
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        read(copy, np.arange(40))


def test_two_threads_may_read_from_more_files_than_are_kept_open(tmp_path: Path) -> None:
    """Train and validation samples of the same files, each with a reader: what one closes, the other may be about to read."""
    paths = [tmp_path / f"{k:02d}.h5" for k in range(20)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=sample(8), chunks=(8, 4, 5), compression="gzip")
    images, bad = opened(*paths), list[Any]()

    def work(seed: int) -> None:
        out = np.empty((1, *images.shape), images.dtype)
        for number in np.random.default_rng(seed).integers(0, images.count, 1500):
            bad.extend(images.read(np.array([number]), out))
            bad.extend([] if (out[0, ..., 0] == sample(8)[number % 8]).all() else [number])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    images = opened(*(write(tmp_path / f"{n:02}.h5", images=sample(2)) for n in range(40)))
    np.testing.assert_array_equal(read(images, np.arange(80))[..., 0], np.tile(sample(2), (40, 1, 1)))
    assert len(images._open) <= 16
    images.close()


def test_a_file_that_is_being_written_is_named_and_one_without_locks_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images=sample())
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="being written by another program"):
            opened(path)
    really = h5py.File

    def lockless(*args: Any, locking: bool | None = None, **options: Any) -> h5py.File:
        if locking is not False:
            raise OSError(38, "Unable to open file (unable to lock file, errno = 38, error message = 'Function not implemented')")
        return really(*args, locking=locking, **options)

    with mock.patch.object(h5py, "File", lockless):
        images = opened(path)
        np.testing.assert_array_equal(read(images, np.arange(40))[..., 0], sample())
        images.close()


@pytest.mark.parametrize(
    ("shape", "chunks", "compression", "block"),
    [
        ((3000, 28, 28), None, None, 1337),
        ((3000, 28, 28), (1, 28, 28), None, 1337),
        ((3000, 28, 28), (100, 28, 28), "lzf", 1400),
        ((6, 1024, 1024), (4, 512, 512), "lzf", 4),
        ((6, 1024, 1024), None, None, 1),
        ((40, 1024, 1024), (40, 1024, 1024), None, 1),
        ((40, 1024, 1024), (40, 1024, 1024), "lzf", 40),
    ],
)
def test_blocks_are_whole_chunks_of_about_a_megabyte(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...] | None, compression: str | None, block: int
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=np.zeros(shape, np.uint8), chunks=chunks, compression=compression)
    images = opened(tmp_path / "a.h5")
    assert (images.block, images.busy) == (block, compression is not None)


# Damaged metadata can end the process inside the library itself, hence the child; and the examples are the same every time.
@settings(deadline=None, max_examples=examples(62, 250), derandomize=True, database=None)
@given(st.sampled_from((0, 1, 3)), st.data())
def damage(folder: Path, storage: int, data: st.DataObject) -> None:
    array = sample()
    with h5py.File(folder / "whole.h5", "w", libver=data.draw(st.sampled_from(("earliest", "latest")))) as file:
        file.create_dataset("images", data=array, chunks=(7, 4, 5) if storage else None, **STORAGE[storage])
        file["labels"] = np.arange(40)
    raw = bytearray((folder / "whole.h5").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "damaged.h5").write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        images = opened(folder / "damaged.h5")
        out, alone = np.empty((2, min(images.count, 100), *images.shape), images.dtype)
        bad = images.read(np.arange(len(out)), out)
        good = [number for number in range(len(out)) if not images.read(np.array([number]), alone[number : number + 1])]
        images.close()
    except DataError:
        return
    assert all(0 <= entry.place < len(out) and "damaged.h5" in entry.name for entry in bad)
    assert good == np.setdiff1d(np.arange(len(out)), [entry.place for entry in bad]).tolist()
    assert out[good].tobytes() == alone[good].tobytes()


def damage_many(folder: Path) -> None:
    damage(folder)  # what hypothesis makes of a function cannot be sent to a child


def test_damaged_bytes_never_crash(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=damage_many, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0, f"see {tmp_path / 'damaged.h5'}"
