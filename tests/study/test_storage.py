"""What the study of storage trains from: equal copies, an HDF5 twin of the same samples, and counts of what was read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data import direct
from deepex.data.dataset import PackedDataset
from deepex.data.feeds import read_counter
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.data.feeds.window import Maps, Windows
from deepex.data.find import OpenDataset, open_dataset
from deepex.data.pack import pack
from deepex.errors import ConfigError, DataError, StorageError, UnknownName
from deepex.machine.storage import describe_file_system
from deepex.record import RunDirectory
from deepex.study.storage import page_cache
from deepex.study.storage.copies import FORMATS, prepare, settings, summary, sweep
from deepex.study.storage.page_cache import drop_cache, resident_bytes
from deepex.training.config import RunConfig
from tests.mpi import run_deepex
from tests.pool import RankPool
from tests.training.on_ranks import train_on

MakeData = Callable[[int], Path]
PLAIN = {"net": "tests.networks:batch_normed", "batch": 8, "epochs": 2, "threads": 1, "device": "cpu", "deterministic": True}


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """A packed dataset whose parts are one file each."""
    chance = np.random.default_rng(3)
    images = chance.integers(0, 256, (160, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", x_train=images, y_train=np.arange(160) % 10, x_test=images[:40] // 2, y_test=np.arange(40) % 10)
    pack(tmp_path / "some.npz", tmp_path / "data")
    return tmp_path / "data"


def read(dataset: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    part = dataset.part(name)
    images, labels = np.empty((part.count, *part.sample_shape), part.dtype), np.empty(part.count, np.int64)
    part.gather(np.arange(part.count), images, labels)
    return images, labels


def open_of(config: RunConfig) -> OpenDataset:
    return open_dataset(config.data, config.data_options)


def config_of(data: Path, directory: Path | None = None, kind: str = "packed", **keys: Any) -> Any:
    """The configuration that a run of the study has on a copy in `directory`, or on the dataset itself."""
    own = {"data": str(data)} if directory is None else settings(data, directory, kind)
    return deepex.recipe("fashion", PLAIN | keys | own)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_copy_has_the_same_samples_in_the_same_places(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, large: bool
) -> None:
    """Also where HDF5 is dealt in blocks of rows, as files above 256 MiB are."""
    if large:
        monkeypatch.setattr(direct, "_SMALL_BYTES", 100_000)
        monkeypatch.setattr(direct, "_LEAST_BANDS", 64)
        monkeypatch.setattr(direct, "_LEAST_BLOCKS", 16)
    prepare(make_data(600), [tmp_path], [kind])
    original, copy = PackedDataset.open(make_data(600)), open_of(config_of(make_data(600), tmp_path, kind))
    assert set(copy.manifest.parts) == {"train", "validation"}
    for name in copy.manifest.parts:
        assert all(np.array_equal(*pair) for pair in zip(read(original, name), read(copy, name), strict=True)), name
    assert copy.manifest.scale == original.manifest.scale
    assert len(copy.manifest.classes) == len(original.manifest.classes)
    if not large:
        assert copy.manifest.mean == pytest.approx(original.manifest.mean, rel=1e-12)
        assert copy.manifest.deviation == pytest.approx(original.manifest.deviation, rel=1e-12)


def test_a_dataset_of_real_numbers_without_labels_or_validation(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(50, 5, 6, 7)).astype(np.float32))
    pack(tmp_path / "x.npy", tmp_path / "data", validation=0.0, layout="NHWC")
    prepare(tmp_path / "data", [tmp_path], ["hdf5"])
    original, copy = PackedDataset.open(tmp_path / "data"), open_of(config_of(tmp_path / "data", tmp_path, "hdf5"))
    assert list(copy.manifest.parts) == ["train"]
    assert np.array_equal(read(original, "train")[0], read(copy, "train")[0])
    assert (copy.manifest.scale, copy.manifest.classes) == (original.manifest.scale, ())


def test_a_training_learns_the_same_from_every_copy(one_file: Path, tmp_path: Path) -> None:
    losses = {}
    prepare(one_file, [tmp_path], FORMATS)
    for kind in FORMATS:
        for placement in ("host", "stream"):
            config = config_of(one_file, tmp_path, kind, placement=placement)
            run = deepex.train(config, SoloCommunicator(), out=tmp_path / f"{kind}-{placement}")
            losses[kind, placement] = [(epoch.train.loss, epoch.validation.loss) for epoch in run.epochs()]
    first = losses.popitem()[1]
    for found in losses.values():
        assert np.allclose(found, first, rtol=1e-5, atol=0), losses


@pytest.mark.slow
def test_the_settings_are_what_the_command_takes(one_file: Path, tmp_path: Path) -> None:
    prepare(one_file, [tmp_path], ["hdf5-gzip"])
    keys = settings(one_file, tmp_path, "hdf5-gzip") | {"epochs": 1, "placement": "stream", "batch": 8}
    words = [f"--set={key}={value}" for key, value in keys.items()]
    done = run_deepex("train", "fashion", "--quiet", "--out", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert RunDirectory.open(tmp_path / "run").state["placement"]["kind"] == "stream"


def test_copies_are_made_once_and_again_where_they_are_damaged(make_data: MakeData, tmp_path: Path) -> None:
    copies = prepare(make_data(64), [tmp_path], FORMATS)
    packed = copies["packed", str(tmp_path)]
    before = {path: path.stat().st_ino for path in packed.parent.rglob("*")}
    assert prepare(make_data(64), [tmp_path], FORMATS) == copies
    assert {path: path.stat().st_ino for path in packed.parent.rglob("*")} == before, "nothing was written again"
    (packed / "manifest.json").unlink()  # as after a kill
    h5py.File(copies["hdf5", str(tmp_path)], "w").close()
    copies["hdf5-gzip", str(tmp_path)].write_bytes(b"no HDF5")
    prepare(make_data(64), [tmp_path], FORMATS)
    for kind in FORMATS:
        assert open_of(config_of(make_data(64), tmp_path, kind)).manifest.parts["train"].count == 64
    assert PackedDataset.open(packed).verify() == []


def test_another_dataset_has_other_copies(make_data: MakeData, tmp_path: Path) -> None:
    first, second = (prepare(make_data(count), [tmp_path], ["hdf5"]) for count in (64, 192))
    assert first.keys() == second.keys()
    assert set(first.values()).isdisjoint(second.values())


def test_what_was_made_is_removed_and_nothing_else(make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    made = prepare(make_data(64), [tmp_path], FORMATS)
    (made["hdf5", str(tmp_path)].with_name(".gzip.h5.part")).touch()
    sweep(make_data(64), [tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    prepare(make_data(64), [tmp_path], ["packed"])
    (made["hdf5", str(tmp_path)].with_name("notes")).touch()
    sweep(make_data(64), [tmp_path])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in (["mine", "notes"], ["notes", "mine"])


def test_too_little_space_is_told_before_anything_is_written(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories on one file system: room for the copies of one is not enough."""
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    data = make_data(64)
    size = sum(path.stat().st_size for path in data.iterdir() if path.is_file())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 * size - 1}))
    with pytest.raises(StorageError, match=r"b has 0.2 MB free, and the copies of .* need 0.2 MB: free space, leave out a format"):
        prepare(data, directories, ["packed"])
    assert not any(path for directory in directories for path in directory.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 * size}))
    assert len(prepare(data, directories, ["packed"])) == 2


def test_mistakes_are_named(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown format 'hdf'; did you mean hdf5"):
        prepare(make_data(64), [tmp_path], ["hdf"])
    with pytest.raises(ConfigError, match="nowhere is not a directory; make it first"):
        prepare(make_data(64), [tmp_path / "nowhere"])
    with pytest.raises(DataError, match="not a packed dataset"):
        prepare(tmp_path, [tmp_path])
    with pytest.raises(UnknownName, match="unknown sample dataset"):
        prepare("sample:fashon", [tmp_path])


def test_a_class_without_samples_at_the_end_has_no_twin(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", x_train=np.zeros((20, 4, 4), np.uint8), y_train=np.arange(20) % 2)
    pack(tmp_path / "some.npz", tmp_path / "data", classes=("a", "b", "none"))
    with pytest.raises(DataError, match="has 3 classes, but no sample of 'none'"):
        prepare(tmp_path / "data", [tmp_path], ["hdf5"])


def train_bytes(data: Path, part: str) -> tuple[int, int]:
    files = [name for file in PackedDataset.open(data).part(part).packed.files for name in (file.images, file.labels)]
    return len(files), sum((data / str(name)).stat().st_size for name in files)


def test_a_cached_run_opens_each_file_once_and_reads_each_byte_once(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(192)
    config = config_of(data, placement="host")
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    first, second = run.epochs()
    opens, num_bytes = train_bytes(data, "train")
    held_opens, held_bytes = train_bytes(data, "validation")
    assert first.usage["opens"] == {"input": [opens], "other": [held_opens]}
    assert first.usage["data_bytes"] == {"input": [num_bytes], "other": [held_bytes]}
    nothing = {"input": [0], "other": [0]}
    assert (second.usage["opens"], second.usage["data_bytes"]) == (nothing, nothing)
    assert opens > 4, "of several files"
    told = summary(run)
    assert (told["first_epoch"]["opens"], told["first_epoch"]["data_bytes"]) == (opens, num_bytes)
    assert (told["steady"]["opens"], told["steady"]["data_bytes"]) == (0, 0)
    assert told["setup"] == {"opens": 0, "data_bytes": 0}
    assert told["first_epoch"]["samples_per_second"] == pytest.approx(first.samples / first.seconds)
    assert told["first_epoch"]["input_share"] == pytest.approx(run.state["input_share"]["first_epoch"])
    assert told["steady"]["input_share"] == pytest.approx(run.state["input_share"]["steady"])


def test_hdf5_reads_every_sample_once_to_measure_it_and_once_to_train(one_file: Path, tmp_path: Path) -> None:
    prepare(one_file, [tmp_path], ["hdf5"])
    run = deepex.train(config_of(one_file, tmp_path, "hdf5", placement="host"), SoloCommunicator(), out=tmp_path / "run")
    first, second = run.epochs()
    images, held, labels = 160 * 784, 40 * 784, 200 * 8
    assert first.usage["data_bytes"] == {"input": [images], "other": [held]}
    assert second.usage["data_bytes"] == {"input": [0], "other": [0]}
    assert run.state["setup_usage"]["data_bytes"] == images + labels + 2 * len(direct.MAGIC)
    assert run.state["setup_usage"]["opens"] == 6, "its first bytes, twice; to find the datasets; each part's; and to measure"


@pytest.mark.ranks
def test_each_rank_counts_its_own(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """Two ranks of a node read each file once between them."""
    data = make_data(600)
    config = deepex.recipe("fashion", {"data": str(data), "epochs": 1, "placement": "host", "batch": 8, "threads": 1})
    usage = train_on(ranks, config, tmp_path / "run").epochs()[0].usage
    opens, num_bytes = train_bytes(data, "train")
    both = {key: [sum(ranks) for ranks in zip(*usage[key].values(), strict=True)] for key in ("opens", "data_bytes")}
    held = train_bytes(data, "validation")
    assert (sum(both["opens"]), sum(both["data_bytes"])) == (opens + held[0], num_bytes + held[1])
    assert min(both["opens"]) > 0, "both read"


@pytest.mark.parametrize("kind", [Windows, Maps])
def test_a_stream_reads_the_files_again_and_again(make_data: MakeData, kind: Any) -> None:
    """Windows read an epoch ahead, so that it is stopped after one whole; maps count what is taken out of them."""
    data = make_data(192)
    part = PackedDataset.open(data).part("train")
    store = kind(Samples(part, Shards(192, 1, 8), range(1), seed=1, shuffled=True))
    images, labels = np.empty((8, *part.sample_shape), part.dtype), np.empty(8, np.int64)
    read_counter.take()
    for epoch in range(2):
        store.begin(epoch, [Turn(0, 0, 24)])
        for begin in range(0, 192, 8):
            store.fill(begin, begin + 8, images, labels)
    store.close()
    opens, num_bytes = read_counter.take()
    once_opens, once_bytes = train_bytes(data, "train")
    if kind is Windows:
        assert 2 * once_opens <= opens <= 3 * once_opens
        assert 2 * once_bytes <= num_bytes <= 3 * once_bytes
    else:
        headers = once_bytes - 192 * (784 + 8)
        assert opens == 2 * once_opens, "for the header, and for the map"
        assert num_bytes == 2 * 192 * 784 + 192 * 8 + headers


def test_compressed_arrays_count_as_they_are_stored(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", x_train=np.zeros((64, 28, 28), np.uint8), y_train=np.arange(64) % 10)
    pack(tmp_path / "some.npz", tmp_path / "data", validation=0.0, compress=True)
    read_counter.take()
    read(PackedDataset.open(tmp_path / "data"), "train")
    files = list((tmp_path / "data").glob("*.xz"))
    assert files
    others = list((tmp_path / "data").glob("*.npy"))
    opens, num_bytes = read_counter.take()
    assert num_bytes == sum(path.stat().st_size for path in [*files, *others])
    assert opens == len(files) + 2 * len(others)


def test_counts_of_all_ranks_become_usage() -> None:
    found = read_counter.usage([1, 2], [10, 20], [0, 3], [0, 30])
    assert found == {"opens": {"input": [1, 2], "other": [0, 3]}, "data_bytes": {"input": [10, 20], "other": [0, 30]}}


def test_pages_are_dropped_where_there_is_a_disk(tmp_path: Path) -> None:
    """What was just written is in memory; dropped, it is not, unless the file system is memory."""
    (tmp_path / "a").write_bytes(bytes(3_000_001))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(bytes(5))
    (tmp_path / "b" / "empty").touch()
    assert resident_bytes(tmp_path / "a") == 3_000_001
    told = drop_cache(tmp_path)
    assert told["bytes"] == 3_000_006
    in_memory = describe_file_system(tmp_path)["kind"] in ("tmpfs", "ramfs")
    assert told["resident_bytes"] == (3_000_006 if in_memory else 0)
    assert told["cold"] is not in_memory
    assert told["note"] == ("3000006 bytes were left in memory" if in_memory else "no page was left in memory")


def test_what_cannot_be_verified_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    monkeypatch.setattr(page_cache, "resident_bytes", lambda _: None)
    told = drop_cache(tmp_path / "a")
    assert (told["resident_bytes"], told["cold"]) == (None, None)
    assert "not verified" in told["note"]
    with pytest.raises(DataError, match="cannot be read: No such file"):
        drop_cache(tmp_path / "none")
