"""HDF5 without packing: every sample once, fair parts of sorted files; training on it, on ranks and resumed."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data import direct
from deepex.data.direct import Hdf5Config, Hdf5Dataset, Hdf5Part, find_hdf5
from deepex.data.feeds.read import ReadInto, Rows
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.data.source.hdf5 import Hdf5Images
from deepex.errors import ConfigError, DataError, RunError
from deepex.recipes import resumed_config
from tests.data.test_feed import WAYS
from tests.full import examples
from tests.pool import RankPool
from tests.training.on_ranks import train_on

NAMED = {"images": "entry/data", "labels": "entry/class"}


@contextmanager
def taken_for_large(*, bands: int = 64, blocks: int = 16) -> Iterator[None]:
    """All files count as large; pieces of 4 KB, and as many bands and blocks as a test's file may have."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_SMALL_BYTES": 0, "_FILE_BYTES": 4096, "_LEAST_BANDS": bands, "_LEAST_BLOCKS": blocks}.items():
            patch.setattr(direct, name, value)
        yield


def write(path: Path, count: int = 300, *, chunk: int | None = 7, first: int = 0, total: int = 0, **options: object) -> Path:
    """Image k is k everywhere, as float32; labels are sorted, the worst that a contiguous shard could meet."""
    numbers = np.arange(first, first + count)
    images = np.broadcast_to(numbers.astype(np.float32)[:, None, None], (count, 6, 5))
    with h5py.File(path, "w") as file:
        stored = {"chunks": (min(chunk, count), 6, 5), "compression": "gzip"} if chunk else {}
        file.create_dataset("entry/data", data=images, **{**stored, **options})
        file.create_dataset("entry/class", data=numbers * 4 // (total or count))
    return path


def read_all(part: Hdf5Part) -> tuple[np.ndarray, np.ndarray]:
    images, labels = np.empty((part.count, *part.sample_shape), part.dtype), np.empty(part.count, np.int64)
    for number, (begin, end) in enumerate(zip(part.bounds[:-1], part.bounds[1:], strict=True)):
        target = ReadInto(0, end - begin, images[begin:end], labels[begin:end])
        part.read_file(number, Rows([target], images[0].nbytes))
    return images, labels


def open_if_fair(path: Path, config: Hdf5Config) -> Hdf5Dataset | None:
    try:
        return Hdf5Dataset.open(path, config)
    except DataError as error:
        if "data_options.validation=0" not in str(error):
            raise
        return None


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.data())
def test_every_sample_is_read_once_whole_or_gathered(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("direct")
    sizes = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) > 1))
    chunk, count = data.draw(st.one_of(st.none(), st.integers(1, 150))), sum(sizes)
    options = data.draw(st.sampled_from([{}, {"compression": None}])) if chunk else {}
    stored = data.draw(st.sampled_from(["<f4", ">f4", "f8", "i2"]))
    for number, size in enumerate(sizes):
        write(folder / f"{number}.h5", size, chunk=chunk, first=sum(sizes[:number]), total=count, dtype=stored, **options)
    config = Hdf5Config(**NAMED, validation=data.draw(st.sampled_from([0.0, 0.1, 0.25])))
    if data.draw(st.booleans()):
        dataset = Hdf5Dataset.open(folder, config)
        held = dataset.manifest.parts["validation"].count if config.validation else 0
        assert held == (max(1, round(config.validation * count)) if config.validation else 0)
    else:
        with taken_for_large():
            opened = open_if_fair(folder, config)
        if opened is None:
            assert config.validation
            assert chunk is not None
            assert not options  # any part of what is not compressed can be held out
            return
        dataset = opened
    assert set(dataset.manifest.parts) == ({"train", "validation"} if config.validation else {"train"})
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


@settings(deadline=None, max_examples=examples(8, 25))
@given(st.integers(1, 1000), st.booleans(), st.sampled_from([0.05, 0.1, 0.5]))
def test_both_parts_of_a_small_sorted_file_have_all_classes_in_proportion(
    tmp_path_factory: pytest.TempPathFactory, chunk: int, compressed: bool, share: float
) -> None:
    """Whatever the chunks; and mean and deviation are those of the train part."""
    labels = np.repeat(np.arange(10), 100)
    images = (labels[:, None, None] * 20 + np.random.default_rng(0).integers(0, 40, (1000, 8, 8))).astype(np.uint8)
    path = tmp_path_factory.mktemp("direct") / "sorted.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(chunk, 8, 8), compression="gzip" if compressed else None)
        file.create_dataset("labels", data=labels)
    dataset = Hdf5Dataset.open(path, Hdf5Config(validation=share))
    held = np.bincount(read_all(dataset.part("validation"))[1], minlength=10)
    assert held.tolist() == [round(100 * share)] * 10
    train, train_labels = read_all(dataset.part("train"))
    assert dataset.manifest.mean == pytest.approx([train.mean() / 255])
    assert dataset.manifest.deviation == pytest.approx([train.std() / 255])
    assert dataset.manifest.mean == pytest.approx([images.mean() / 255], rel=0.01)
    for quarter in np.array_split(train_labels, 4):  # a shard
        assert (np.bincount(quarter, minlength=10) > (1 - share) * 10).all()


@pytest.mark.parametrize(("chunk", "options"), [(None, {}), (7, {}), (20, {}), (900, {"compression": None})])
def test_parts_and_shards_of_a_large_sorted_file_have_all_classes(
    tmp_path: Path, chunk: int | None, options: dict[str, object]
) -> None:
    path = write(tmp_path / "a.h5", 4000, chunk=chunk, **options)
    with taken_for_large(bands=400, blocks=200):
        dataset = Hdf5Dataset.open(path, Hdf5Config(**NAMED))
    part, manifest = dataset.part("train"), dataset.manifest
    images, labels = read_all(part)
    assert len(part.bounds) > 50
    assert np.diff(part.bounds).max() * part.sample_bytes <= 4096 + 20 * part.sample_bytes
    for quarter in np.array_split(labels, 4):
        assert (np.bincount(quarter, minlength=4) > 100).all()
    held = read_all(dataset.part("validation"))[1]
    assert len(held) == pytest.approx(400, abs=20)
    assert np.bincount(held, minlength=4) == pytest.approx(100, abs=20)
    low, high = manifest.scale
    assert np.array(manifest.mean) * (high - low) + low == pytest.approx(images.mean(), rel=0.1)
    assert np.array(manifest.deviation) * (high - low) == pytest.approx(images.std(), rel=0.1)
    assert "bands of up to" in manifest.source["validation"]


def test_each_chunk_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files in one go, in their order; large ones straight into the cache."""
    for number, size in enumerate((290, 310)):
        write(tmp_path / f"{number}.h5", size, chunk=7, first=290 * number, total=600)
    small = Hdf5Dataset.open(tmp_path, Hdf5Config(**NAMED)).part("train")
    with taken_for_large():
        large = Hdf5Dataset.open(tmp_path, Hdf5Config(**NAMED)).part("train")
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    read = Hdf5Images.read
    monkeypatch.setattr(Hdf5Images, "read", lambda self, *pair: seen.append(pair) or read(self, *pair))
    read_all(small)
    assert len(seen) == 1
    assert (np.diff(seen[0][0]) > 0).all()
    seen.clear()
    images, _ = read_all(large)
    assert all(np.shares_memory(out, images) for _, out in seen)
    chunks = [np.unique(np.where(numbers < 290, numbers // 7, 1000 + (numbers - 290) // 7)) for numbers, _ in seen]
    assert len(np.unique(np.concatenate(chunks))) == len(np.concatenate(chunks)) < 290 // 7 + 310 // 7


def test_a_large_file_is_measured_in_few_bands_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5", 4000, chunk=10)
    seen: list[np.ndarray] = []
    read = Hdf5Images.read
    monkeypatch.setattr(Hdf5Images, "read", lambda self, numbers, out: seen.append(numbers) or read(self, numbers, out))
    with taken_for_large(bands=400):
        first = Hdf5Dataset.open(path, Hdf5Config(**NAMED)).manifest
        numbers = np.concatenate(seen)
        assert len(numbers) == 16 * 10
        assert (np.bincount(numbers // 1000) == 40).all()
        assert Hdf5Dataset.open(path, Hdf5Config(**NAMED)).manifest == first
    assert first.source["moments"] == "of 160 of 3600 train samples"


@pytest.mark.parametrize(
    ("chunk", "words"), [(400, "400 samples in 1 bands that can only be read whole"), (50, "class . would be")]
)
def test_no_fair_validation_part_of_a_large_file_is_an_error(tmp_path: Path, chunk: int, words: str) -> None:
    """Two of eight chunks cannot be of four classes; shuffled, they are."""
    path = write(tmp_path / "a.h5", 400, chunk=chunk)
    config = Hdf5Config(**NAMED, validation=0.25)
    with taken_for_large():
        with pytest.raises(DataError, match=words + ".*; pack it .* or train without"):
            Hdf5Dataset.open(path, config)
        with h5py.File(path, "r+") as file:
            file["entry/class"][:] = np.arange(400) % 4
        if chunk == 50:
            assert Hdf5Dataset.open(path, config).manifest.parts["validation"].count == 100
        without = Hdf5Dataset.open(path, Hdf5Config(**NAMED, validation=0.0)).manifest
        assert set(without.parts) == {"train"}
        assert without.source["validation"] == "none, as asked"


def test_one_sample_cannot_be_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", 1)
    with pytest.raises(DataError, match=r"1 samples .* too few to hold out a share of 0\.1; pack it"):
        Hdf5Dataset.open(path, Hdf5Config(**NAMED))


def test_a_validation_part_of_the_files_is_kept(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, count in {"train": 30, "test": 9}.items():
            file[f"x_{name}"], file[f"y_{name}"] = np.zeros((count, 4, 4), np.uint8), np.arange(count) % 3
    manifest = Hdf5Dataset.open(tmp_path / "a.h5", Hdf5Config()).manifest
    assert {name: part.count for name, part in manifest.parts.items()} == {"train": 30, "validation": 9}
    assert manifest.source["validation"] == "the files' own"


def test_hidden_files_are_no_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    (tmp_path / "._a.h5").write_bytes(b"\0\5\x16\7 of macOS")
    assert find_hdf5(tmp_path) == [path]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "._a.h5").touch()
    assert find_hdf5(tmp_path / "b") == []


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "host"])
def test_every_placement_gives_the_same_batches(tmp_path: Path, way: str, large: bool) -> None:
    path, config = write(tmp_path / "a.h5", 300), Hdf5Config(**NAMED)

    def batches(way: str) -> list[list[float]]:
        part = Hdf5Dataset.open(path, config).part("train")
        shards = Shards(part.count, 4, 8)
        feed = WAYS[way](Samples(part, shards, range(1, 3), seed=3, shuffled=True))
        found = []
        for epoch in range(2):
            turns = [Turn(replica, 0, shards.steps) for replica in (1, 2)]
            feed.begin(epoch, turns)
            for _ in range(sum(shards.steps for _ in turns)):
                images, labels = feed.next()
                assert (labels.numpy() == images[:, 0, 0, 0].numpy().astype(int) * 4 // 300).all()
                found.append(images[:, 0, 0, 0].tolist())
        feed.close()
        return found

    if large:
        with taken_for_large():
            assert batches(way) == batches("host")
    else:
        assert batches(way) == batches("host")


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["entry/data"][123, 2, 2] = np.nan
    with pytest.raises(DataError, match=r"a\.h5 entry/data\[123\] has a value that is not finite"):
        read_all(Hdf5Dataset.open(path, Hdf5Config(images="entry/data", validation=0.0)).part("train"))


@pytest.mark.parametrize("large", [False, True])
def test_a_label_that_stands_for_none_is_named(tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["entry/class"]
        file["entry/class"] = np.array([0] * 299 + [2**32 - 1], np.uint32)
    monkeypatch.setattr(np, "bincount", None)  # no list with a place for each of four billion classes
    monkeypatch.setattr(direct, "range", None, raising=False)
    with taken_for_large() if large else nullcontext(), pytest.raises(DataError, match=r"has the label 4294967295; .*: renumber"):
        Hdf5Dataset.open(path, Hdf5Config(**NAMED))


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


@pytest.mark.parametrize("value", [0.0, -3.0, 1e17])
def test_one_value_everywhere_has_a_scale_too(tmp_path: Path, value: float) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.full((20, 4, 4), value, np.float32)
    manifest = Hdf5Dataset.open(tmp_path / "a.h5", Hdf5Config()).manifest
    assert manifest.scale[0] == np.float32(value) < manifest.scale[1]
    assert (manifest.mean, manifest.deviation) == ((0.0,), (1.0,))


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


def test_ranks_train_on_it_and_resume(ranks: RankPool, tmp_path: Path) -> None:
    """Brighter images of later classes: an easy problem, so that learning shows that images and labels belong together."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    images = (labels[:, None, None] * 50 + random.integers(0, 40, (400, 28, 28))).astype(np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(10, 28, 28), compression="gzip")
        file.create_dataset("labels", data=labels)
    keys = {"data": str(tmp_path / "a.h5"), "batch": 10, "epochs": 2, "net": "lenet", "threads": 1}
    train_on(ranks, deepex.recipe("fashion", keys), tmp_path / "run")
    deepex.train(resumed_config(tmp_path / "run", {"epochs": 6}), SoloCommunicator(), out=tmp_path / "run", resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["samples"] == 360 for line in lines)
    stated = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert stated["validation"] == "40 single samples, one from each of as many equal ranges of the files"
    assert stated["moments"] == "of 360 of 360 train samples"
    assert stated["mean"] == pytest.approx([images.mean() / 255], rel=0.02)
    assert lines[-1]["validation"]["measures"]["error"] < 0.2


def test_a_run_does_not_go_on_with_other_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", 80)
    options = {"images": "entry/data", "labels": "entry/class"}
    config = deepex.RunConfig(net="tests.networks:normed", data=str(path), data_options=options, batch=8, epochs=1)
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    with h5py.File(path, "r+") as file:
        file["entry/class"][:] = file["entry/class"][:][::-1]
    with pytest.raises(RunError, match="was trained on another dataset"):
        deepex.train(dataclasses.replace(config, epochs=2), SoloCommunicator(), out=run.path, resume=True)
