"""Shards, orders and feeds: every sample once, the same batches from every placement, errors from a thread in the consumer."""

import gc
import itertools
import math
import re
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepex.data.augment import AugmentConfig
from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.feeds import order as orders
from deepex.data.feeds import read
from deepex.data.feeds.cache import Cache
from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.feed import Feed, HostFeed, SlotFeed
from deepex.data.feeds.node import NodePlan
from deepex.data.feeds.order import cut, epoch_groups, epoch_order, epoch_windows
from deepex.data.feeds.placement import Placement, choose_placement, make_feed, most_modest
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards, Slices
from deepex.data.feeds.store import Store
from deepex.data.feeds.window import Maps, Stream, Windows, one_by_one, ring_rows
from deepex.data.find import SAMPLES
from deepex.data.pack import pack
from deepex.data.prepare import Prepare
from deepex.errors import ConfigError
from tests.full import examples

MakeData = Callable[[int], Path]
CPU = torch.device("cpu")
COUNT = 130
FILE_SAMPLES = (2, 10, 51, 1000)
# Every way to make batches that a run may take; on a CPU a run uses the first three, on a GPU the others, with its device.
WAYS: dict[str, Callable[[Samples], Feed]] = {
    "device": lambda samples: make_feed(Placement(kind="device", reason=""), samples, CPU),
    "host": lambda samples: make_feed(Placement(kind="host", reason=""), samples, CPU),
    "stream": lambda samples: make_feed(Placement(kind="stream", reason=""), samples, CPU, verify=True),
    "device memory": lambda samples: DeviceFeed(samples, CPU, verify=True),
    "host slots": lambda samples: SlotFeed(samples, Cache(samples, verify=True), CPU),
    "stream slots": lambda samples: SlotFeed(samples, Stream(samples), CPU),
    "maps": lambda samples: HostFeed(samples, Maps(samples, verify=True)),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, PackedPart]:
    """The first images of the shipped sample, in files of so many samples."""
    sample = PackedDataset.open(SAMPLES / "fashion")
    folder = tmp_path_factory.mktemp("parts")
    images, labels = sample.part("train").read(0, COUNT)
    np.savez(folder / "some.npz", images=images, labels=labels)
    made = {}
    for samples in FILE_SAMPLES:
        out = folder / str(samples)
        pack(folder / "some.npz", out, classes=sample.manifest.classes, validation=0.0, file_bytes=samples * 784)
        made[samples] = PackedDataset.open(out).part("train")
        assert len(made[samples].packed.files) == -(-COUNT // samples)
    return made


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 24 samples, where a run has 256 MiB."""
    monkeypatch.setattr(orders, "WINDOW_BYTES", 24 * 784)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9))
def test_shards_cover_every_sample_once(count: int, replicas: int, batch: int) -> None:
    if replicas > count // batch:
        with pytest.raises(ConfigError, match="one full batch; use ") as caught:
            Shards(count, replicas, batch)
        fewer, smaller = (re.search(what, str(caught.value)) for what in (r"at most (\d+) replicas", r"batch (\d+)$"))
        assert (fewer is None) == (count < batch)
        assert (smaller is None) == (count < replicas)
        assert fewer is None or Shards(count, int(fewer[1]), batch).steps
        assert smaller is None or Shards(count, replicas, int(smaller[1])).steps
        return
    shards = Shards(count, replicas, batch)
    bounds = [shards.bounds(r) for r in range(replicas)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    for start in range(shards.steps):
        for stop in range(start + 1, shards.steps + 1):
            assert shards.total_samples(start, stop) == sum(shards.samples(r, start, stop) for r in range(replicas))
    assert shards.total_samples(0, shards.steps) == count


@given(st.integers(0, 50), st.integers(1, 9))
def test_slices_cover_every_sample_once(count: int, ranks: int) -> None:
    bounds = [Slices(count, ranks, 8).bounds(rank) for rank in range(ranks)]
    assert [bound for pair in bounds for bound in range(*pair)] == list(range(count))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.data(), st.integers(0, 3), st.integers(0, 4), st.integers(1, 60))
def test_windows_visit_each_sample_of_the_shard_once(
    files: list[int], data: st.DataObject, seed: int, epoch: int, most: int
) -> None:
    """And a window has at most so many samples, or one piece; and the same windows are told without the samples' order."""
    bounds = np.cumsum([0, *files])
    start = data.draw(st.integers(0, sum(files) - 1))
    stop = data.draw(st.integers(start + 1, sum(files)))
    keys: Any = {"seed": seed, "replica": 1, "epoch": epoch, "sample_bytes": orders.WINDOW_BYTES // most}
    windows = epoch_windows((start, stop), bounds, **keys)
    assert sorted(np.concatenate([window.visited for window in windows])) == list(range(start, stop))
    assert (epoch_order((start, stop), bounds, **keys) == np.concatenate([window.visited for window in windows])).all()
    for window in windows:
        assert len(window.pieces) == 1 or (epoch > 0 and len(window.order) <= most)
    assert [list(window.pieces) for window in windows] == epoch_groups((start, stop), bounds, **keys)
    assert sorted(piece for window in windows for piece in window.pieces) == cut((start, stop), bounds)


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9), st.sampled_from([[0, 101], [0, 20, 40, 60, 101]]))
def test_an_epoch_is_a_permutation_that_the_seed_decides(replica: int, seed: int, epoch: int, bounds: list[int]) -> None:
    shards = Shards(101, 6, 4)

    def order(seed: int, epoch: int) -> list[int]:
        span = shards.bounds(replica)
        return epoch_order(span, np.array(bounds), seed=seed, replica=replica, epoch=epoch, sample_bytes=1).tolist()

    assert sorted(order(seed, epoch)) == list(range(*shards.bounds(replica)))
    assert order(seed, epoch) == order(seed, epoch)
    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


def test_replicas_and_seeds_shuffle_each_in_its_own_way() -> None:
    """Replicas of equal shards do not go through them in step; and a dataset of a given order is shuffled by the seed."""
    bounds = np.array([0, 30, 60])
    keys: Any = {"seed": 1, "epoch": 2, "sample_bytes": 1}
    first, second = (epoch_order((30 * k, 30 * k + 30), bounds, replica=k, **keys) - 30 * k for k in range(2))
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()
    shuffles = [orders.dataset_order(60, seed=seed).tolist() for seed in (1, 2, 1)]
    assert shuffles[0] == shuffles[2] != shuffles[1]


def test_the_order_of_an_epoch_never_changes() -> None:
    """Made with numpy 2.4; another order would break resumed runs and every comparison with older ones.

    The first, of 2026-11-15, is a shard within one file. The other two came when the order of a shard of several files was changed
    from one permutation of all its samples to one of its pieces and then of the samples of a window, so that files can be read
    whole and in time: pieces one by one in the first epoch, windows of up to 5 samples in a later one.
    """
    keys: Any = {"seed": 1, "replica": 0, "sample_bytes": orders.WINDOW_BYTES // 5}
    assert epoch_order((0, 10), np.array([0, 10]), epoch=0, **keys).tolist() == [6, 2, 1, 0, 8, 4, 3, 9, 7, 5]
    assert epoch_order((0, 10), np.array([0, 3, 5, 8, 12]), epoch=0, **keys).tolist() == GOLDEN[0]
    assert epoch_order((0, 10), np.array([0, 3, 5, 8, 12]), epoch=1, **keys).tolist() == GOLDEN[1]


GOLDEN = ([8, 9, 0, 2, 1, 3, 4, 5, 7, 6], [5, 7, 6, 4, 3, 2, 8, 9, 1, 0])


def collect(feed: Feed, turns: list[Turn], epochs: range) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every batch of these epochs, the first begun with `turns` and the others as a run would begin them."""
    batches = []
    for epoch in epochs:
        whole = [Turn(turn.replica, 0 if turn.start == turns[0].start else turn.start, turn.stop) for turn in turns]
        feed.begin(epoch, turns if epoch == epochs[0] else whole)
        while True:
            try:
                images, labels = feed.next()
            except StopIteration:
                break
            batches.append((images.numpy().copy(), labels.numpy().copy()))
    feed.close()
    return batches


@pytest.mark.slow
@settings(max_examples=examples(10, 40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_placement_hands_out_the_same_batches(data: st.DataObject, parts: dict[int, PackedPart], small_windows: None) -> None:
    """And they are those of `epoch_order`, or of one shuffle of the dataset and a permutation of the shard."""
    part = parts[data.draw(st.sampled_from(FILE_SAMPLES), "file")]
    per_rank, ranks = data.draw(st.integers(1, 3), "per rank"), data.draw(st.integers(1, 3), "ranks")
    batch = data.draw(st.integers(1, COUNT // (per_rank * ranks)), "batch")
    shards = Shards(COUNT, per_rank * ranks, batch)
    rank, shuffled = data.draw(st.integers(0, ranks - 1), "rank"), data.draw(st.booleans(), "shuffled")
    replicas = range(rank * per_rank, (rank + 1) * per_rank)
    period = data.draw(st.integers(1, shards.steps), "period")
    begin = data.draw(st.integers(0, shards.steps - 1), "begin")
    segments = [(start, min(start + period, shards.steps)) for start in range(begin, shards.steps, period)]
    turns = [Turn(replica, *segment) for segment in segments for replica in replicas]
    epochs = range(data.draw(st.integers(0, 2), "epoch"), 3)

    expected = []
    for epoch in epochs:
        here = [(0 if (start == begin and epoch != epochs[0]) else start, stop) for start, stop in segments]
        for (start, stop), replica in itertools.product(here, replicas):
            positions = reference_order(part, shards, replica, epoch, shuffled=shuffled)[start * batch : stop * batch]
            expected += [positions[k : k + batch] for k in range(0, len(positions), batch)]
    images, labels = part.read(0, COUNT)
    for name, way in WAYS.items():
        samples = Samples(part, shards, replicas, seed=5, shuffled=shuffled)
        found = collect(way(samples), turns, epochs)
        assert len(found) == len(expected), name
        for (some_images, some_labels), positions in zip(found, expected, strict=True):
            assert (some_images == images[positions]).all(), name
            assert (some_labels == labels[positions]).all(), name


def reference_order(part: PackedPart, shards: Shards, replica: int, epoch: int, *, shuffled: bool) -> np.ndarray:
    sample_bytes = int(np.prod(part.sample_shape)) * part.dtype.itemsize
    keys: Any = {"seed": 5, "replica": replica, "epoch": epoch, "sample_bytes": sample_bytes}
    if shuffled:
        return epoch_order(shards.bounds(replica), part.bounds, **keys)
    whole = orders.dataset_order(COUNT, seed=5)
    return whole[epoch_order(shards.bounds(replica), np.array([0, COUNT]), **keys)]


@pytest.mark.parametrize("shuffled", [True, False])
def test_without_a_seed_the_samples_come_as_packed(shuffled: bool, parts: dict[int, PackedPart]) -> None:
    part = parts[10]
    images, labels = part.read(0, COUNT)
    for name, way in WAYS.items():
        found = []
        for rank in range(3):
            samples = Samples(part, Slices(COUNT, 3, 8), range(rank, rank + 1), seed=None, shuffled=shuffled)
            found += collect(way(samples), [Turn(rank, 0, 6)], range(1))
        assert (np.concatenate([batch[0] for batch in found]) == images).all(), name
        assert (np.concatenate([batch[1] for batch in found]) == labels).all(), name


@pytest.fixture(scope="module")
def reals(tmp_path_factory: pytest.TempPathFactory) -> PackedPart:
    """Images of 24 bytes, each with its own number, in files of 51."""
    folder = tmp_path_factory.mktemp("reals")
    images = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
    np.savez(folder / "some.npz", images=images, labels=np.arange(COUNT) % 7)
    pack(folder / "some.npz", folder / "packed", classes=list("abcdefg"), validation=0.0, file_bytes=51 * 24)
    return PackedDataset.open(folder / "packed").part("train")


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_real_numbers_that_takes_several_requests(
    way: str, shuffled: bool, reals: PackedPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of 4 samples; the shard begins and ends within a file and within a request."""
    monkeypatch.setattr(read, "REQUEST_BYTES", 4 * 24)
    shards = Shards(COUNT, 3, 10)
    found = collect(WAYS[way](Samples(reals, shards, range(1, 2), seed=5, shuffled=shuffled)), [Turn(1, 0, 5)], range(1))
    images, labels = reals.read(0, COUNT)
    positions = reference_order(reals, shards, 1, 0, shuffled=shuffled)
    assert (np.concatenate([batch[0] for batch in found]) == images[positions]).all()
    assert (np.concatenate([batch[1] for batch in found]) == labels[positions]).all()


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "maps"])
def test_a_batch_waits_for_every_file_of_its_window(
    way: str, shuffled: bool, parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    """From a slow disk, with two files to a window."""
    part, original = parts[10], parts[10].read_file

    def slowly(*arguments: Any, **keys: Any) -> None:
        sleep(0.01)
        original(*arguments, **keys)

    monkeypatch.setattr(part, "read_file", slowly)
    shards = Shards(COUNT, 1, 10)
    found = collect(WAYS[way](Samples(part, shards, range(1), seed=5, shuffled=shuffled)), [Turn(0, 0, 13)], range(1, 2))
    images, labels = part.read(0, COUNT)
    positions = reference_order(part, shards, 0, 1, shuffled=shuffled)
    assert (np.concatenate([batch[0] for batch in found]) == images[positions]).all()
    assert (np.concatenate([batch[1] for batch in found]) == labels[positions]).all()


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_reader_that_is_late_to_end_is_waited_for(
    shuffled: bool, parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples are on the device, and the thread that read them has its last words to say."""
    original = NodePlan.forget

    def slowly(self: NodePlan) -> None:
        sleep(0.3)
        original(self)

    monkeypatch.setattr(NodePlan, "forget", slowly)
    samples = Samples(parts[10], Shards(COUNT, 1, 10), range(1), seed=5, shuffled=shuffled)
    assert len(collect(DeviceFeed(samples, CPU), [Turn(0, 0, 13)], range(1))) == 13


@pytest.mark.timeout(30)
@pytest.mark.parametrize("way", WAYS)
def test_any_epoch_can_begin_at_any_time(way: str, parts: dict[int, PackedPart], small_windows: None) -> None:
    """Not the one after the last, within one, in the middle of one, the same again."""
    part, shards = parts[10], Shards(COUNT, 1, 8)
    images, labels = part.read(0, COUNT)
    feed = WAYS[way](Samples(part, shards, range(1), seed=5, shuffled=True))
    for epoch, start, num_batches in ((0, 0, 17), (3, 0, 17), (4, 9, 8), (4, 0, 5), (5, 0, 17), (5, 0, 1), (6, 3, 14)):
        feed.begin(epoch, [Turn(0, start, 17)])
        order = reference_order(part, shards, 0, epoch, shuffled=True)[8 * start :]
        for k in range(num_batches):
            some_images, some_labels = feed.next()
            assert (some_images.numpy() == images[order[8 * k : 8 * k + 8]]).all()
            assert (some_labels.numpy() == labels[order[8 * k : 8 * k + 8]]).all()
    feed.close()


@pytest.mark.parametrize("make", [Cache, Windows, Maps])
def test_a_file_is_verified_once(make: Callable[..., Store], parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch) -> None:
    part, original, verified = parts[10], parts[10].read_file, Counter[int]()

    def read_file(number: int, *arguments: Any, verify: bool = False, **keys: Any) -> None:
        verified[number] += verify
        original(number, *arguments, verify=verify, **keys)

    monkeypatch.setattr(part, "read_file", read_file)
    samples = Samples(part, Shards(COUNT, 1, 8), range(1), seed=5, shuffled=True)
    collect(HostFeed(samples, make(samples, verify=True)), [Turn(0, 0, 17)], range(3))
    assert verified == dict.fromkeys(range(13), 1)


def test_an_epoch_that_was_read_ahead_is_not_read_again(parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch) -> None:
    part, original, numbers, ahead = parts[10], parts[10].read_file, list[int](), threading.Event()

    def read_file(number: int, *arguments: Any, **keys: Any) -> None:
        original(number, *arguments, **keys)
        numbers.append(number)
        if len(numbers) == 26:
            ahead.set()

    monkeypatch.setattr(part, "read_file", read_file)
    samples = Samples(part, Shards(COUNT, 1, 8), range(1), seed=5, shuffled=True)
    feed = HostFeed(samples, Windows(samples))
    for epoch in range(2):
        feed.begin(epoch, [Turn(0, 0, 17)])
        for _ in range(17):
            feed.next()
        assert ahead.wait(30)
        sleep(0.05)  # for what the reader may do when it has read the next epoch
    feed.close()
    assert len(numbers) <= 3 * 13


@pytest.mark.parametrize("make", [Cache, Windows])
def test_a_batch_is_gathered_without_a_copy_beside_it(make: Callable[..., Store], parts: dict[int, PackedPart]) -> None:
    samples = Samples(parts[1000], Shards(COUNT, 1, 100), range(1), seed=5, shuffled=True)
    store, (images, labels) = make(samples), samples.empty(100)
    store.begin(0, [Turn(0, 0, 2)])
    store.fill(0, 100, images, labels)
    tracemalloc.start()
    try:
        store.fill(0, 100, images, labels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    store.close()
    assert peak < 0.5 * images.nbytes


@pytest.mark.parametrize("shuffled", [True, False])
def test_batches_that_are_skipped_are_on_the_device(
    shuffled: bool, parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once, as a captured step takes them: where `next` would find them, once the files with their samples are there."""
    samples = Samples(parts[10], Shards(COUNT, 1, 8), range(1), seed=5, shuffled=shuffled)
    turns = [Turn(0, 0, 17)]
    expected = collect(DeviceFeed(samples, CPU), turns, range(1))
    feed = DeviceFeed(samples, CPU)
    feed.begin(0, turns)
    assert feed._plan is not None
    bounds, waited, wait = list(samples.batches(turns)), set[int](), feed._memory.wait
    monkeypatch.setattr(feed._memory, "wait", lambda file: (waited.add(file), wait(file)))
    for first, stop in ((0, 5), (5, 6), (6, 17)):
        feed.skip(stop - first)
        windows = {number for begin, end in bounds[:stop] for number in feed._plan.windows_of(begin, end)}
        assert waited == {file for number in windows for file in samples.files_of(feed._plan.windows[number])}
        for (begin, end), (images, labels) in zip(bounds[first:stop], expected[first:stop], strict=True):
            places = feed.order[begin:end]
            assert torch.equal(feed.images[places], torch.as_tensor(images))
            assert torch.equal(feed.labels[places], torch.as_tensor(labels))
    feed.close()


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_host_keeps_nothing_when_the_device_has_all(shuffled: bool, parts: dict[int, PackedPart]) -> None:
    feed = DeviceFeed(Samples(parts[10], Shards(COUNT, 1, 8), range(1), seed=5, shuffled=shuffled), CPU)
    kept = [weakref.ref(one) for one in (feed._exchange, *feed._memory._buffers, feed._memory._pinned_labels)]
    feed.begin(0, [Turn(0, 0, 17)])
    for _ in range(17):
        feed.next()
    assert feed._loader is not None
    feed._loader.join()
    gc.collect()
    assert [one() for one in kept] == [None] * 4
    feed.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_samples_has_no_batch(way: str, parts: dict[int, PackedPart]) -> None:
    feed = WAYS[way](Samples(parts[10], Slices(COUNT, 3, 8), range(0), seed=None, shuffled=True))
    for epoch in range(2):
        feed.begin(epoch, [])
        with pytest.raises(StopIteration):
            feed.next()
    feed.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_feed_closes_in_the_middle_of_an_epoch(way: str, parts: dict[int, PackedPart]) -> None:
    feed = WAYS[way](Samples(parts[10], Shards(COUNT, 1, 8), range(1), seed=5, shuffled=True))
    feed.begin(0, [Turn(0, 0, 17)])
    feed.next()
    feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepex")]


def test_a_slot_is_not_overwritten_while_it_is_held(parts: dict[int, PackedPart]) -> None:
    """The worker runs ahead by one batch at most: what `next` gave stays as it was until `next` is called again."""
    feed = WAYS["host slots"](Samples(parts[51], Shards(COUNT, 1, 8), range(1), seed=5, shuffled=True))
    feed.begin(0, [Turn(0, 0, 17)])
    for _ in range(17):
        images, _labels = feed.next()
        before = images.clone()
        torch.randn(200, 200).mm(torch.randn(200, 200))
        assert torch.equal(images, before)
    feed.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_a_thread_is_raised_in_the_consumer(
    way: str, parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_file(number: int, *_: object, **__: object) -> None:
        raise MemoryError(f"no memory for file {number}")

    part = parts[10]
    monkeypatch.setattr(part, "read_file", read_file)
    feed = WAYS[way](Samples(part, Shards(COUNT, 1, 8), range(1), seed=5, shuffled=True))
    if way == "maps":
        monkeypatch.setattr(part, "gather", read_file)
    feed.begin(0, [Turn(0, 0, 17)])
    with pytest.raises(MemoryError, match="no memory for file"):
        feed.next()
    feed.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "maps"])
def test_training_begins_before_the_last_file_is_read(
    way: str, parts: dict[int, PackedPart], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    """The reader stands still before its last file; all batches but those of that file can be had."""
    part, allowed, read = parts[10], threading.Event(), []
    original = part.read_file

    def read_file(number: int, *arguments: Any, **keys: Any) -> None:
        if len(read) == 12:
            assert allowed.wait(60)
        original(number, *arguments, **keys)
        read.append(number)

    monkeypatch.setattr(part, "read_file", read_file)
    feed = WAYS[way](Samples(part, Shards(COUNT, 1, 10), range(1), seed=5, shuffled=True))
    feed.begin(0, [Turn(0, 0, 13)])
    for _ in range(11 if "slots" in way else 12):  # a worker is one batch ahead, and stands there
        feed.next()
    assert len(read) <= 12
    allowed.set()
    for _ in range(2 if "slots" in way else 1):
        feed.next()
    with pytest.raises(StopIteration):
        feed.next()
    feed.close()


@pytest.mark.parametrize(("segments", "replicas", "expected"), [(4, 1, True), (1, 3, True), (2, 3, False)])
def test_windows_are_for_turns_that_do_not_come_back(
    segments: int, replicas: int, expected: bool, parts: dict[int, PackedPart]
) -> None:
    samples = Samples(parts[10], Shards(COUNT, 3, 8), range(replicas), seed=5, shuffled=True)
    turns = [Turn(replica, k, k + 1) for k in range(segments) for replica in range(replicas)]
    assert one_by_one(samples, turns) is expected
    given_order = Samples(parts[10], Shards(COUNT, 3, 8), range(1), seed=5, shuffled=False)
    assert not one_by_one(given_order, [Turn(0, 0, 2)])


def test_stream_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows and a batch, and what one request needs; of 4.7 MB of samples in files of 100."""
    sample = PackedDataset.open(SAMPLES / "fashion")
    images, labels = sample.part("train").read(0, 6000)
    np.savez(tmp_path / "some.npz", images=images, labels=labels)
    pack(tmp_path / "some.npz", tmp_path / "packed", classes=sample.manifest.classes, validation=0.0, file_bytes=100 * 784)
    part = PackedDataset.open(tmp_path / "packed").part("train")
    monkeypatch.setattr(orders, "WINDOW_BYTES", 300 * 784)
    samples = Samples(part, Shards(6000, 1, 32), range(1), seed=5, shuffled=True)
    assert ring_rows(samples) == 2 * 300 + 32
    assert ring_rows(Samples(part, Shards(6000, 60, 32), range(1), seed=5, shuffled=True)) == 100, "all that there are"
    tracemalloc.start()
    try:
        store = Windows(samples, verify=True)
        out = samples.empty(32)
        for epoch in range(2):
            store.begin(epoch, [Turn(0, 0, 188)])
            for begin, end in samples.batches([Turn(0, 0, 188)]):
                store.fill(begin, end, out[0][: end - begin], out[1][: end - begin])
        store.close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ring, orders_of_two_epochs = (2 * 300 + 32) * (784 + 8), 2 * 4 * 8 * 6000
    assert peak < ring + orders_of_two_epochs + 200_000


def test_prepare_standardises(make_data: MakeData) -> None:
    dataset = PackedDataset.open(make_data(130))
    raw, _ = (torch.from_numpy(a) for a in dataset.part("train").read(0, 130))
    for channels_last in (False, True):
        images = Prepare(dataset.manifest, CPU, standardise=True, channels_last=channels_last)(raw)
        assert images.shape == (130, 1, 28, 28)
        assert images.mean().abs() < 1e-4
        assert images.std() == pytest.approx(1.0, abs=1e-3)
    unit = Prepare(dataset.manifest, CPU, standardise=False, channels_last=True)(raw)
    assert (float(unit.min()), float(unit.max())) == (0.0, 1.0)
    assert raw.dtype == torch.uint8


@pytest.mark.parametrize("channels_last", [False, True])
def test_prepare_maps_each_channel_on_its_own(channels_last: bool, make_data: MakeData) -> None:
    """From a range that does not begin at 0."""
    manifest = PackedDataset.open(make_data(130)).manifest
    mean, deviation = (0.25, 0.5, 0.75), (0.5, 1.0, 2.0)
    manifest = replace(manifest, shape=(3, 4, 5), dtype="float32", scale=(-1.0, 3.0), mean=mean, deviation=deviation)
    raw = torch.linspace(-1, 3, 2 * 4 * 5 * 3).reshape(2, 4, 5, 3)
    unit = (raw + 1) / 4
    for standardise, expected in ((False, unit), (True, (unit - torch.tensor(mean)) / torch.tensor(deviation))):
        images = Prepare(manifest, CPU, standardise=standardise, channels_last=channels_last)(raw)
        assert torch.allclose(images, expected.permute(0, 3, 1, 2), atol=1e-6)
        assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_prepare_augments_for_training_alone(make_data: MakeData) -> None:
    dataset = PackedDataset.open(make_data(130))
    raw, _ = (torch.from_numpy(a) for a in dataset.part("train").read(0, 130))
    plain = Prepare(dataset.manifest, CPU, standardise=False, channels_last=False)
    prepare = Prepare(dataset.manifest, CPU, standardise=False, channels_last=False, augment=AugmentConfig(crop=20, flip=True))
    middle = plain(raw)[:, :, 4:24, 4:24]
    assert torch.equal(prepare(raw), middle)
    assert torch.equal(prepare(raw, train=False), middle)
    torch.manual_seed(1)
    assert (prepare(raw, train=True) != middle).any(dim=(1, 2, 3)).float().mean() > 0.9
    assert torch.equal(plain(raw, train=True), plain(raw))


SIZES = st.integers(0, 10**12)


@settings(max_examples=examples(50, 200))
@example(samples=0, arena=2, activations=None, free_device=0, free_host=4, ranks=1, device="cpu")  # to the last byte
@example(samples=0, arena=2, activations=1, free_device=0, free_host=4, ranks=1, device="cpu")
@given(SIZES, SIZES, st.none() | SIZES, SIZES, SIZES, st.integers(1, 8), st.sampled_from(["cpu", "cuda"]))
def test_a_placement_fits(  # noqa: PLR0917
    samples: int, arena: int, activations: int | None, free_device: int, free_host: int, ranks: int, device: str
) -> None:
    numbers: Any = {
        "samples_bytes": samples, "arena_bytes": arena, "activation_bytes": activations, "device": device,
        "free_device_bytes": free_device, "free_host_bytes": free_host, "ranks_on_device": ranks,
    }  # fmt: skip
    chosen = choose_placement("auto", **numbers)
    assert chosen.reason
    free = free_device // ranks if device == "cuda" else math.floor(0.8 * free_host)
    kept = math.ceil(0.5 * free if activations is None else 1.25 * activations)
    fits_device = samples + arena + kept + (10**9 if device == "cuda" else 0) <= free
    fits_host = device == "cuda" and samples <= 0.8 * free_host
    assert chosen.kind == ("device" if fits_device else "host" if fits_host else "stream")
    assert (chosen.estimate["free_device_bytes"], chosen.estimate["free_host_bytes"]) == (int(free), int(0.8 * free_host))
    parts = ("samples_bytes", "arena_bytes", "activation_bytes", "reserve_bytes")
    assert chosen.estimate["device_bytes"] == sum(chosen.estimate[part] for part in parts)
    for kind in ("device", "host", "stream"):
        asked = choose_placement(kind, **numbers)
        assert (asked.kind, asked.estimate) == (kind, chosen.estimate)


def test_imagenet_fits_an_h200() -> None:
    """82 GB of samples, ResNet-50 with gradients and momentum, its activations at batch 128 in float32, 140 GB free."""
    chosen = choose_placement(
        "auto", samples_bytes=82 * 10**9, arena_bytes=3 * 4 * 25_557_032, activation_bytes=11 * 10**9, device="cuda",
        free_device_bytes=140 * 10**9, free_host_bytes=500 * 10**9,
    )  # fmt: skip
    assert chosen.kind == "device"


def test_samples_that_go_through_host_memory_must_fit_there_too() -> None:
    numbers: Any = {"samples_bytes": 9 * 10**9, "arena_bytes": 1, "activation_bytes": 1, "free_device_bytes": 140 * 10**9}
    kinds = [
        choose_placement("auto", device="cuda", free_host_bytes=free * 10**9, through_host=through, **numbers).kind
        for free, through in ((8, False), (8, True), (20, True))
    ]
    assert kinds == ["device", "stream", "device"]


def test_ranks_agree_on_what_all_have_memory_for() -> None:
    kinds = [Placement(kind=kind, reason=kind) for kind in ("device", "stream", "host")]
    assert most_modest(kinds).kind == "stream"
    assert most_modest([kinds[0], kinds[2]]).kind == "host"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepex")]
