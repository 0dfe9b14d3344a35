"""HDF5 without packing: every sample once, in whole blocks; training on it, on ranks and resumed."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepex
from deepex.data import direct
from deepex.data.direct import Hdf5Config, Hdf5Dataset, Hdf5Part
from deepex.data.feeds.read import Rows, Target
from deepex.errors import ConfigError, DataError
from tests.mpi import run_deepex, run_ranks


def write(path: Path, count: int = 300, *, chunk: int | None = 7, **options: object) -> Path:
    """Image k is k everywhere, as float32; labels are sorted, the worst that a contiguous shard could meet."""
    images = np.broadcast_to(np.arange(count, dtype=np.float32)[:, None, None], (count, 6, 5))
    with h5py.File(path, "w") as file:
        stored = {"chunks": (chunk, 6, 5), "compression": "gzip"} if chunk else {}
        file.create_dataset("entry/data", data=images, **{**stored, **options})
        file.create_dataset("entry/class", data=np.arange(count) * 4 // count)
    return path


def read_all(part: Hdf5Part) -> tuple[np.ndarray, np.ndarray]:
    images, labels = np.empty((part.count, *part.sample_shape), part.dtype), np.empty(part.count, np.int64)
    for number, (begin, end) in enumerate(zip(part.bounds[:-1], part.bounds[1:], strict=True)):
        target = Target(0, end - begin, images[begin:end], labels[begin:end])
        part.read_file(number, Rows([target], images[0].nbytes))
    return images, labels


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_every_sample_is_read_once_whole_or_gathered(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("direct")
    count, chunk = data.draw(st.integers(2, 200)), data.draw(st.one_of(st.none(), st.integers(1, 40)))
    stored = data.draw(st.sampled_from(["<f4", ">f4", "f8", "i2"]))
    path = write(folder / "a.h5", count, chunk=None if chunk is None else min(chunk, count), dtype=stored)
    config = Hdf5Config(images="entry/data", labels="entry/class", validation=data.draw(st.sampled_from([0.0, 0.25])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_FILE_BYTES", data.draw(st.sampled_from([10 * 120, 64 << 20])))  # of samples of 120 bytes
        dataset = Hdf5Dataset.open(path, config)
    seen = []
    for name in dataset.manifest.parts:
        part = dataset.part(name)
        assert dataset.manifest.parts[name].count == part.count
        assert part.dtype == np.float32
        images, labels = read_all(part)
        assert (images == images[:, :1, :1]).all()
        values = images[:, 0, 0, 0].astype(int)
        assert (labels == values * 4 // count).all()
        seen += values.tolist()
        picked = np.array(data.draw(st.lists(st.integers(0, part.count - 1), max_size=9)), np.int64)
        some = np.empty((len(picked), *part.sample_shape), part.dtype), np.empty(len(picked), np.int64)
        part.gather(picked, *some)
        assert (some[0] == images[picked]).all()
        assert (some[1] == labels[picked]).all()
    assert sorted(seen) == list(range(count))


def test_a_shard_of_sorted_classes_has_all_of_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", 2000)
    part = Hdf5Dataset.open(path, Hdf5Config(images="entry/data", labels="entry/class")).part("train")
    _, labels = read_all(part)
    for quarter in np.array_split(labels, 4):
        assert (np.bincount(quarter, minlength=4) > 50).all()


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["entry/data"][123, 2, 2] = np.nan
    with pytest.raises(DataError, match=r"a\.h5 entry/data\[123\] has a value that is not finite"):
        read_all(Hdf5Dataset.open(path, Hdf5Config(images="entry/data", validation=0.0)).part("train"))


def test_a_chunk_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", chunk=10)
    with h5py.File(path) as file:
        place = file["entry/data"].id.get_chunk_info(3).byte_offset
    raw = bytearray(path.read_bytes())
    raw[place : place + 8] = b"\xff" * 8
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.h5 entry/data\[3\d\]: .*; restore the file, or pack it with --skip-bad"):
        read_all(Hdf5Dataset.open(path, Hdf5Config(images="entry/data", validation=0.0)).part("train"))


def test_the_scale_is_the_one_given_or_that_of_the_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", 201)  # 0 to 200
    for scale, expected in (((), (0.0, 200.0)), ((-100.0, 300.0), (-100.0, 300.0))):
        manifest = Hdf5Dataset.open(path, Hdf5Config(images="entry/data", validation=0.0, scale=scale)).manifest
        assert manifest.scale == expected
        assert manifest.mean == pytest.approx([(100 - expected[0]) / (expected[1] - expected[0])])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"imges": "x"}, "data_options.imges"), ({"validation": 1.5}, "validation is 1.5"), ({"scale": [3, 1]}, "low below high")],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, object], words: str) -> None:
    path = write(tmp_path / "a.h5")
    config = deepex.recipe("fashion", {"data": str(path), "data_options": options})
    with pytest.raises(ConfigError, match=words):
        deepex.train(config, out=tmp_path / "run")


def test_options_for_hdf5_are_refused_for_a_packed_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_options are for HDF5"):
        deepex.train(deepex.recipe("fashion", {"data_options": {"images": "x"}}), out=tmp_path / "run")


def test_ranks_train_on_it_and_resume(tmp_path: Path) -> None:
    """Brighter images of later classes: an easy problem, so that learning shows that images and labels belong together."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    images = (labels[:, None, None] * 50 + random.integers(0, 40, (400, 28, 28))).astype(np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(10, 28, 28), compression="gzip")
        file.create_dataset("labels", data=labels)
    options = ["--set", f"data={tmp_path / 'a.h5'}", "--set", "batch=10", "--set", "epochs=2", "--set", "net=lenet", "--quiet"]
    done = run_ranks(2, "-m", "deepex", "train", "fashion", *options, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    again = run_deepex("train", "--resume", str(tmp_path / "run"), "--ranks", "1", "--set", "epochs=4", "--quiet")
    assert again.returncode == 0, again.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples"] == 360 for line in lines)
    assert lines[-1]["validation"]["error"] < 0.2
