"""The cache of a node: each file read once, by one rank, in large requests, checked; and failures that reach all who wait."""

import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import deepex
import tests.networks
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.feeds import read
from deepex.data.feeds.cache import Cache
from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.exchange import Exchange
from deepex.data.feeds.feed import HostFeed
from deepex.data.feeds.gate import Gates
from deepex.data.feeds.node import NodePlan
from deepex.data.feeds.order import epoch_windows
from deepex.data.feeds.read import REQUEST_BYTES, ReadInto, Rows, Stopped, hand_over, most_rows, read_rows, requests
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.data.feeds.window import Stream
from deepex.data.find import SAMPLES
from deepex.data.pack import pack
from deepex.errors import DataError
from deepex.nets import build
from deepex.step.cost import activation_bytes
from tests.data.reading import read_on_ranks
from tests.full import examples
from tests.mpi import HANGS, rank_environ, run_deepex
from tests.pool import RankPool

MakeData = Callable[[int], Path]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepex")]


class Part:
    """Files of so many samples, as far as a plan needs to know."""

    def __init__(self, files: list[int]) -> None:
        self.count, self.bounds = sum(files), np.cumsum([0, *files])
        self.sample_shape, self.dtype = (1, 1, 1), np.dtype(np.uint8)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 3), st.data())
def test_each_file_of_a_node_has_one_reader_and_every_sample_one_place(
    files: list[int], ranks: int, per_rank: int, data: st.DataObject
) -> None:
    """For any ranks of a job that happen to be on one node."""
    part: Any = Part(files)
    if part.count < ranks * per_rank:
        return
    shards = Shards(part.count, ranks * per_rank, 1)
    here = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    neighbours = [range(rank * per_rank, (rank + 1) * per_rank) for rank in here]
    for shuffled in (True, False):
        samples = Samples(part, shards, neighbours[0], seed=1, shuffled=shuffled)
        plan = NodePlan(samples, neighbours)
        assert set(plan.reader) == set(plan.files)
        places = set[tuple[int, int]]()
        for file in plan.files:
            low = int(part.bounds[file])
            found = (
                [(n.rank, n.position + k, low + n.first + k) for n in plan.needs(file) for k in range(n.size)]
                if shuffled
                else [(n.rank, p, low + row) for n in plan.scattered(file) for row, p in zip(n.rows, n.positions, strict=True)]
            )
            for rank, position, in_files in found:
                mine = Samples(part, shards, neighbours[rank], seed=1, shuffled=shuffled)
                assert mine.in_files(np.array([position]))[0] == in_files
                assert (rank, position) not in places
                places.add((rank, position))
            if shuffled:
                sizes = {need.rank: need.size for need in plan.needs(file)}
                assert sizes[plan.reader[file]] == max(sizes.values()), "the rank with most samples in it"
        assert len(places) == sum(stop - start for start, stop in plan.spans)
        order = plan.ordered(2, [Turn(r, 0, shards.steps) for r in neighbours[0]])
        assert sorted(order) == plan.files


def test_files_are_read_in_the_order_of_their_first_use() -> None:
    """One replica per rank: of its own files, the first window's come first; a file for two ranks comes when the first needs it."""
    part: Any = Part([10] * 8)
    shards = Shards(80, 2, 4)
    neighbours = [range(1), range(1, 2)]
    plan = NodePlan(Samples(part, shards, neighbours[0], seed=1, shuffled=True), neighbours)
    for epoch in (0, 1):
        order = plan.ordered(epoch, [Turn(0, 0, shards.steps)])
        for replica in (0, 1):
            keys: Any = {"seed": 1, "replica": replica, "epoch": epoch, "sample_bytes": 1}
            windows = epoch_windows(shards.bounds(replica), part.bounds, **keys)
            needed = [piece[0] // 10 for window in windows for piece in window.pieces]
            mine = [file for file in order if file in needed]
            assert mine == needed if epoch == 0 else sorted(mine) == sorted(needed)
    half = plan.ordered(0, [Turn(0, 5, shards.steps)])
    first = epoch_windows(shards.bounds(0), part.bounds, seed=1, replica=0, epoch=0, sample_bytes=1)[0]
    assert half.index(first.pieces[0][0] // 10) >= 4, "what a resumed epoch has behind it comes last"


def test_files_are_read_in_the_order_of_their_first_use_by_replicas_in_turn() -> None:
    """Two replicas of a rank take turns of four steps; a batch is half a file."""
    part: Any = Part([10] * 8)
    samples = Samples(part, Shards(80, 2, 5), range(2), seed=1, shuffled=True)
    turns = [Turn(replica, start, start + 4) for start in (0, 4) for replica in range(2)]
    plan, order = NodePlan(samples, [range(2)]), samples.plan(0).order
    used = [int(samples.in_files(order[begin:end])[0]) // 10 for begin, end in samples.batches(turns)]
    assert plan.ordered(0, turns) == list(dict.fromkeys(used))


def test_what_others_read_for_a_rank_has_room_beside_each_other() -> None:
    """Of three ranks, the middle one has the smaller part of the two files that it shares."""
    part: Any = Part([37] * 8 + [4])
    exchange = Exchange(Samples(part, Shards(300, 3, 8), range(1, 2), seed=1, shuffled=True), None, whole=False)
    exchange._plan([[rank, rank, rank + 1] for rank in range(3)], own=1)
    rooms = sorted((row, row + need.size) for need, row in exchange.foreign.values())
    assert rooms == [(0, 11), (11, 26)]
    assert len(exchange.plan.files) * Gates.NUM_BYTES + 26 * (1 + 8) < exchange.num_bytes


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 images in files of 37: a rank of two or three starts within a file, and the middle one of three has two read for it."""
    return make_files(tmp_path_factory.mktemp("many"), 300, 37)


def make_files(folder: Path, count: int, per_file: int) -> Path:
    sample = PackedDataset.open(SAMPLES / "fashion")
    images, labels = sample.part("train").read(0, count)
    np.savez(folder / "some.npz", images=images, labels=labels)
    pack(folder / "some.npz", folder / "packed", classes=sample.manifest.classes, validation=0.0, file_bytes=per_file * 784)
    return folder / "packed"


CASES = ["host-shuffled", "host-given", "device-shuffled", "device-given"]
UNVERIFIED = ["host-shuffled-unverified", "device-shuffled-unverified"]
Report = dict[str, list[Any]]


@pytest.fixture(scope="module")
def on_ranks(many_files: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Report]:
    """What tests.data.reading finds, on so many ranks."""
    damaged = make_files(tmp_path_factory.mktemp("damaged"), 60, 100)
    damage(damaged / "train-00000.npy")
    vanished = make_files(tmp_path_factory.mktemp("vanished"), 60, 30)
    (vanished / "train-00001.npy").unlink()
    work: dict[str, list[Any]] = {
        "batches": ["batches", many_files, *CASES, *UNVERIFIED, "stream-shuffled"],
        "nodes": ["batches", many_files, "--nodes=2+1", *CASES],
        "damaged": ["failure", damaged, *CASES],
        "vanished": ["failure", vanished, "host-given"],
    }

    def run(size: int, name: str) -> Report:
        found: Report = ranks.run(read_on_ranks, work[name], size=size)[0]
        return found

    return run


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_file_is_opened_once_by_one_rank_of_a_node(
    size: int, many_files: Path, on_ranks: Callable[[int, str], Report]
) -> None:
    """And all ranks get the batches that they would have read themselves (checked there), from `stream` too."""
    found = on_ranks(size, "batches")
    assert found.keys() == {*CASES, *UNVERIFIED, "stream-shuffled"}
    names = {path.name for path in many_files.glob("*.npy")}
    assert len(names) == 18
    sizes = {path.stat().st_size for path in many_files.glob("*.npy")}
    for case in CASES + UNVERIFIED:
        assert len(found[case]) == size
        opened = [name for counts, _ in found[case] for name, times in counts.items() for _ in range(times)]
        assert sorted(opened) == sorted(names), "each of the files, and none twice"
        assert size == 1 or all(counts for counts, _ in found[case]), "and not all by one rank"
        assert all(size in sizes for _, requested in found[case] for size in requested), "a small file is one request"


@pytest.mark.ranks
def test_nodes_may_have_different_numbers_of_ranks(many_files: Path, on_ranks: Callable[[int, str], Report]) -> None:
    """2 ranks on one node, 1 on another: a file is read once on each, and all get their batches (checked there)."""
    found, names = on_ranks(3, "nodes"), {path.name for path in many_files.glob("*.npy")}
    for case in CASES:
        nodes = [Counter(found[case][0][0]) + Counter(found[case][1][0]), Counter(found[case][2][0])]
        assert all(set(opened.values()) == {1} for opened in nodes)
        assert set().union(*nodes) == names
        twice = (
            {"train-00005.npy", "train-00005-labels.npy"} if "shuffled" in case else names
        )  # 185 up to 222, of which 200 are rank 2's
        assert nodes[0].keys() & nodes[1].keys() == twice


@pytest.mark.ranks
def test_a_failed_read_reaches_all_ranks(on_ranks: Callable[[int, str], Report]) -> None:
    """One file for three ranks: rank 0 reads it, and finds it changed."""
    found = on_ranks(3, "damaged")
    assert found.keys() == set(CASES)
    for said in found.values():
        assert len(said) == 3
        assert all(text.startswith("DataError") and "train-00000.npy was changed after packing" in text for text in said)
        assert all("verify=false" in text for text in said)
        assert all("rank 0" in text for text in said[1:])


@pytest.mark.ranks
def test_a_file_that_vanishes_fails_those_who_need_it(on_ranks: Callable[[int, str], Report]) -> None:
    (said,) = on_ranks(2, "vanished").values()
    assert len(said) == 2
    assert all("DataError" in text and "train-00001.npy is missing" in text for text in said)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("placement", ["device", "host", "stream"])
@pytest.mark.parametrize("name", ["train-00001.npy", "train-00001-labels.npy", "validation-00000.npy"])
def test_a_damaged_file_ends_the_run_before_its_first_checkpoint(
    placement: str, name: str, make_data: MakeData, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(make_data(130), data)
    swap_labels(data / name) if "labels" in name else damage(data / name)
    keys = {"data": str(data), "epochs": 1, "batch": 8, "placement": placement, "replicas": 2, "threads": 1}
    with pytest.raises(DataError, match=rf"{name} was changed after packing.*verify=false"):
        deepex.train(deepex.recipe("fashion", keys), SoloCommunicator(), out=tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    run = deepex.train(deepex.recipe("fashion", {**keys, "verify": False}), SoloCommunicator(), out=tmp_path / "as-it-is")
    assert run.state["status"] == "finished"


def test_a_damaged_file_is_found_in_a_memory_map(tmp_path: Path) -> None:
    """As replicas that take turns read it: when the first sample of it is wanted, and not before."""
    folder = make_files(tmp_path, 60, 10)
    damage(folder / "train-00003.npy")
    samples = Samples(PackedDataset.open(folder).part("train"), Shards(60, 2, 10), range(2), seed=None, shuffled=True)
    feed = HostFeed(samples, Stream(samples, verify=True))
    feed.begin(0, [Turn(replica, step, step + 1) for step in range(3) for replica in range(2)])
    feed.next()
    with pytest.raises(DataError, match=r"train-00003.npy was changed after packing.*verify=false"):
        feed.next()
    feed.close()


def swap_labels(path: Path) -> None:
    labels = np.load(path)
    assert labels[0] != labels[-1]
    labels[[0, -1]] = labels[[-1, 0]]
    np.save(path, labels)


@pytest.mark.slow
def test_a_damaged_dataset_ends_a_job_of_ranks_with_2(make_data: MakeData, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(make_data(130), data)
    damage(data / "train-00001.npy")
    settings = [f"--set={s}" for s in (f"data={data}", "epochs=1", "batch=8", "threads=1")]
    result = run_deepex("train", "fashion", "--ranks=2", f"--out={tmp_path / 'run'}", *settings)
    assert result.returncode == 2, result.stderr
    assert "train-00001.npy was changed after packing" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_windows_are_given_back_when_maps_take_over(many_files: Path) -> None:
    """The rest of a resumed epoch is one segment of each replica; later ones may be several."""
    part = PackedDataset.open(many_files).part("train")
    samples = Samples(part, Shards(part.count, 2, 8), range(2), seed=1, shuffled=True)
    stream, steps = Stream(samples), samples.shards.steps
    for epoch, segments in enumerate(([(4, steps)], [(0, 4), (4, steps)])):
        turns = [Turn(replica, *segment) for segment in segments for replica in range(2)]
        stream.begin(epoch, turns)
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("deepex")]
        assert len(threads) == 1 - epoch
        for begin, end in samples.batches(turns):
            images, labels = samples.empty(end - begin)
            stream.fill(begin, end, images, labels)
            assert (labels == part.read(0, part.count)[1][samples.plan(epoch).order[begin:end]]).all()
    stream.close()


def test_a_truncated_file_is_named_before_anything_is_trained(make_data: MakeData, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(make_data(130), data)
    path = data / "train-00002.npy"
    path.write_bytes(path.read_bytes()[:-5000])
    config = deepex.recipe("fashion", {"data": str(data), "epochs": 1, "batch": 8})
    with pytest.raises(DataError, match=r"train-00002.npy is truncated"):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_cache_takes_little_more_than_the_samples(tmp_path: Path) -> None:
    part = PackedDataset.open(make_files(tmp_path, 2000, 200)).part("train")
    samples = Samples(part, Shards(2000, 1, 32), range(1), seed=1, shuffled=True)
    cache = Cache(samples)
    assert cache.num_bytes <= 1.1 * 2000 * 784
    assert cache.images.dtype == np.uint8


@pytest.mark.slow
def test_a_run_records_the_estimate_and_the_share_of_input(make_data: MakeData, tmp_path: Path) -> None:
    config = deepex.recipe("fashion", {"data": str(make_data(64)), "epochs": 3, "batch": 8, "net": "lenet", "threads": 1})
    state = deepex.train(config, SoloCommunicator(), out=tmp_path / "run").state
    estimate = state["placement"]["estimate"]
    assert estimate["samples_bytes"] == (64 + 64) * (784 + 8)
    assert estimate["activation_bytes"] > 8 * 784
    assert 0 < state["input_share"]["steady"] < 1
    assert 0 < state["input_share"]["first_epoch"] < 1
    one = deepex.train(
        deepex.recipe("fashion", {"data": str(make_data(64)), "epochs": 1}), SoloCommunicator(), out=tmp_path / "one"
    )
    assert one.state["input_share"]["steady"] is None


@given(st.integers(1, 100_000), st.integers(1, 1_000_000), st.integers(0, 1000))
def test_requests_are_large_or_one(count: int, row_bytes: int, first: int) -> None:
    found = list(requests(first, first + count, row_bytes))
    assert (found[0][0], found[-1][1]) == (first, first + count)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    sizes = [(high - low) * row_bytes for low, high in found]
    assert len(found) == 1 or min(sizes) >= REQUEST_BYTES
    assert max(sizes) < 2 * REQUEST_BYTES + 2 * row_bytes


@example(261, 110, 250)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 2000))
def test_no_request_for_a_part_is_larger_than_what_has_room(count: int, part: int, row_kib: int) -> None:
    """A smaller file may need the larger request."""
    sizes = [high - low for low, high in requests(0, min(part, count), row_kib << 10)]
    assert max(sizes) <= most_rows(count, row_kib << 10) <= count


@pytest.mark.parametrize("feed", ["host", "device"])
def test_a_rank_that_stops_reading_tells_the_others_nothing(feed: str, many_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, for a reason of its own that it tells itself: theirs would come first and hide it."""
    told: list[BaseException] = []
    monkeypatch.setattr(Exchange, "fail", lambda _, error: told.append(error))
    begun = threading.Event()

    def stop(*_: object, **__: object) -> None:
        begun.set()
        raise Stopped

    monkeypatch.setattr(PackedPart, "read_file", stop)
    part = PackedDataset.open(many_files).part("train")
    samples = Samples(part, Shards(part.count, 1, 8), range(1), seed=1, shuffled=True)
    made = HostFeed(samples, Cache(samples)) if feed == "host" else DeviceFeed(samples, torch.device("cpu"))
    made.begin(0, [Turn(0, 0, samples.shards.steps)])
    assert begun.wait(HANGS)
    made.close()
    assert told == []


@settings(max_examples=examples(12, 50))
@given(data=st.data())
def test_a_short_read_is_continued(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A system may give fewer bytes than were asked for, and a file's rows may go to several places."""
    folder = tmp_path_factory.mktemp("short")
    rows = np.arange(40 * 7, dtype=np.uint8).reshape(40, 7)
    (folder / "file").write_bytes(b"head" + rows.tobytes())
    edges = sorted(data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True)))
    out, labels = np.zeros_like(rows), np.zeros(40, np.int64)
    targets = [ReadInto(a, b, out[a:b], labels[a:b]) for a, b in list(itertools.pairwise(edges))[::2]]
    original, hashing = os.preadv, data.draw(st.booleans())

    def preadv(file: int, views: list[memoryview], offset: int) -> int:
        return original(file, [views[0][: data.draw(st.integers(1, len(views[0])))]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(read, "REQUEST_BYTES", data.draw(st.sampled_from([13 * 7, REQUEST_BYTES])))
        sink = Rows(targets, 7)
        keys: Any = {"row_bytes": 7, "count": 40, "span": (edges[0], edges[-1]), "hashing": hashing}
        header, digest = read_rows(folder / "file", sink=sink, **keys)
    assert digest == (hashlib.sha256((folder / "file").read_bytes()).hexdigest() if hashing else None)
    assert header == b"head"
    wanted = np.zeros(40, bool)
    for target in targets:
        wanted[target.first : target.last] = True
    assert (out[wanted] == rows[wanted]).all()
    assert not out[~wanted].any()


def test_reading_ends_before_the_next_request_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "REQUEST_BYTES", 10 * 7)
    rows = np.arange(1, 40 * 7 + 1).astype(np.uint8).reshape(40, 7)
    (tmp_path / "file").write_bytes(b"head" + rows.tobytes())
    out, told = np.zeros_like(rows), iter([False, False, True])
    sink = Rows([ReadInto(0, 40, out, np.zeros(40, np.int64))], 7, lambda: next(told))
    with pytest.raises(Stopped):
        read_rows(tmp_path / "file", row_bytes=7, count=40, span=(0, 40), sink=sink, hashing=False)
    assert (out[:20] == rows[:20]).all()
    assert not out[20:].any()


def test_rows_may_go_to_more_places_than_one_request_takes(tmp_path: Path) -> None:
    """Of every two rows one is wanted; Linux takes 1,024 places."""
    rows = np.arange(3000 * 2, dtype=np.uint16).reshape(3000, 2)
    (tmp_path / "file").write_bytes(b"head" + rows.tobytes())
    out, labels = np.zeros((1500, 2), np.uint16), np.zeros(1500, np.int64)
    targets = [ReadInto(2 * k, 2 * k + 1, out[k : k + 1], labels[k : k + 1]) for k in range(1500)]
    read_rows(tmp_path / "file", row_bytes=4, count=3000, span=(0, 3000), sink=Rows(targets, 4), hashing=False)
    assert (out == rows[::2]).all()


def test_rows_in_memory_are_handed_over_as_if_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a compressed file: to several places, in several requests."""
    monkeypatch.setattr(read, "REQUEST_BYTES", 10 * 7)
    rows = np.arange(40 * 7, dtype=np.int16).astype(np.uint8).reshape(40, 7)
    out, labels = np.zeros_like(rows), np.zeros(40, np.int64)
    targets = [ReadInto(first, last, out[first:last], labels[first:last]) for first, last in ((3, 8), (9, 25), (30, 38))]
    hand_over(rows, (3, 38), Rows(targets, 7))
    wanted = np.r_[3:8, 9:25, 30:38]
    assert (out[wanted] == rows[wanted]).all()
    assert not np.delete(out, wanted, axis=0).any()


@pytest.mark.timeout(30)
def test_whoever_waits_for_a_file_is_let_go(many_files: Path) -> None:
    """Its reader may be a rank that is gone, which will never open the gate."""
    part = PackedDataset.open(many_files).part("train")
    exchange = Exchange(Samples(part, Shards(300, 1, 8), range(1), seed=1, shuffled=True), None, whole=True)
    assert not exchange.is_ready(0)
    exchange.stopped.set()
    with pytest.raises(Stopped):
        exchange.wait(0)


def test_a_file_that_is_cut_while_it_is_read(many_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PackedDataset.open(many_files).part("train")
    feed = HostFeed(samples := Samples(part, Shards(300, 1, 8), range(1), seed=1, shuffled=True), Cache(samples))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    feed.begin(0, [Turn(0, 0, 38)])
    with pytest.raises(DataError, match=r"ends at offset 0.*cut while in use"):
        feed.next()
    feed.close()


def test_a_gate_opens_once_for_all() -> None:
    gates = Gates(np.zeros(2 * Gates.NUM_BYTES, np.uint8), 2)
    gates.make()
    assert not gates.passed(0, 0.01)
    passed = []
    waiting = [threading.Thread(target=lambda: passed.append(gates.passed(1, 30))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    gates.open(1)
    for thread in waiting:
        thread.join()
    assert passed == [True] * 3
    assert gates.passed(1, 0)
    assert not gates.passed(0, 0)


def test_a_signal_does_not_end_the_wait_at_a_gate() -> None:
    gates = Gates(np.zeros(Gates.NUM_BYTES, np.uint8), 1)
    gates.make()
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert not gates.passed(0, 0.1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came


def test_a_gate_wakes_another_process(tmp_path: Path) -> None:
    """Which sleeps until then: a gate of one process would leave it asleep, and its wait would end without success."""
    memory = np.memmap(tmp_path / "gates", np.uint8, "w+", shape=(2 * Gates.NUM_BYTES,))
    gates = Gates(memory, 2)
    gates.make()
    script = """if True:
        import sys
        import numpy as np
        from deepex.data.feeds.gate import Gates
        gates = Gates(np.memmap(sys.argv[1], np.uint8, "r+"), 2)
        gates.open(0)
        sys.exit(0 if gates.passed(1, 5) else 3)
    """
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / "gates"], env=rank_environ()) as other:
        assert gates.passed(0, 30)
        threading.Event().wait(0.2)  # for the other to fall asleep
        gates.open(1)
        assert other.wait(HANGS) == 0


def test_activations_are_those_that_a_step_keeps() -> None:
    """A linear layer keeps its input, ReLU its output, which the next layer shares."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    assert activation_bytes(network, (1, 28, 28), 32) == 32 * 4 * (784 + 100)
    resnet = build("resnet50", channels=3, size=(64, 64), classes=10)
    assert activation_bytes(resnet, (3, 64, 64), 128) == pytest.approx(11.0e9 * (64 / 224) ** 2, rel=0.05)


def test_an_estimate_leaves_no_trace() -> None:
    """Neither in batch norm's statistics nor in the random numbers; and a network that fails fails later, with its own words."""
    network = tests.networks.normed(1, 10)
    before, state = {name: value.clone() for name, value in network.state_dict().items()}, torch.random.get_rng_state()
    assert activation_bytes(network, (1, 28, 28), 4) == 2 * activation_bytes(network, (1, 28, 28), 2)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert activation_bytes(network, (3, 28, 28), 4) is None
