"""Feeds on a GPU: the samples of the CPU's, filled in the background, without a word to the host. Run with `make test-gpu`."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.feeds import order as orders
from deepex.data.feeds.feed import Feed
from deepex.data.feeds.placement import Placement, make_feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.data.pack import pack
from tests.mpi import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
COUNT, BATCH, STEPS = 600, 32, 19


@pytest.fixture(autouse=True)
def _gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a GPU"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 random images of 3×64×64, 7 MB, in files of 50."""
    made, chance = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    images = chance.integers(0, 256, (COUNT, 64, 64, 3), dtype=np.uint8)
    np.savez(made / "some.npz", images=images, labels=np.arange(COUNT) % 7)
    pack(made / "some.npz", made / "packed", classes=list("abcdefg"), validation=0.0, layout="NHWC", file_bytes=50 * 64 * 64 * 3)
    return made / "packed"


@pytest.fixture
def part(folder: Path) -> PackedPart:
    found = PackedDataset.open(folder).part("train")
    assert len(found.packed.files) == 12
    return found


def make(kind: str, part: PackedPart, device: torch.device, *, shuffled: bool = True) -> Feed:
    samples = Samples(part, Shards(COUNT, 1, BATCH), range(1), seed=1, shuffled=shuffled)
    return make_feed(Placement(kind=kind, reason=""), samples, device, verify=True)


def batches(feed: Feed, *, slowly: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch of three epochs, each used by a slow kernel before it is read: an early overwrite would show."""
    found = []
    for epoch in range(3):
        feed.begin(epoch, [Turn(0, 0, STEPS)])
        for _ in range(STEPS):
            images, labels = feed.next()
            if slowly:
                torch.cuda._sleep(2_000_000)
            found.append((images.clone(), labels.clone()))
    feed.close()
    return [(images.cpu(), labels.cpu()) for images, labels in found]


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("kind", ["device", "host", "stream"])
def test_a_gpu_gets_the_batches_of_a_cpu(kind: str, shuffled: bool, part: PackedPart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "WINDOW_BYTES", 120 * 64 * 64 * 3)
    expected = batches(make("host", part, CPU, shuffled=shuffled))
    found = batches(make(kind, part, CUDA, shuffled=shuffled), slowly=True)
    assert len(found) == len(expected) == 3 * STEPS
    for (images, labels), (reference, reference_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, reference)
        assert torch.equal(labels, reference_labels)


@pytest.mark.parametrize("kind", ["device", "host", "stream"])
def test_the_first_epoch_waits_for_files_without_synchronising_the_device(kind: str, part: PackedPart) -> None:
    feed = make(kind, part, CUDA)
    feed.begin(0, [Turn(0, 0, STEPS)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = torch.zeros((), device=CUDA)
        for _ in range(STEPS):
            images, labels = feed.next()
            total += images.sum() + labels.sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    feed.close()
    images, labels = part.read(0, COUNT)
    assert total.item() == pytest.approx(images.sum() + labels.sum(), rel=1e-4)


@pytest.mark.parametrize("kind", ["device", "host", "stream"])
def test_training_begins_before_the_last_file_is_read(kind: str, part: PackedPart, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, original, read = threading.Event(), part.read_file, []

    def read_file(number: int, *arguments: Any, **keys: Any) -> None:
        if len(read) == 11:
            assert allowed.wait(60)
        original(number, *arguments, **keys)
        read.append(number)

    monkeypatch.setattr(part, "read_file", read_file)
    feed = make(kind, part, CUDA)
    feed.begin(0, [Turn(0, 0, STEPS)])
    for _ in range(15):  # 480 samples of the first 550; `host` and `stream` are a batch or two ahead
        feed.next()
    assert len(read) <= 11
    allowed.set()
    for _ in range(STEPS - 15):
        feed.next()
    feed.close()


def test_the_device_has_the_samples_once(part: PackedPart) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    feed = make("device", part, CUDA)
    feed.begin(0, [Turn(0, 0, STEPS)])
    for _ in range(STEPS):
        feed.next()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1.1 * COUNT * 64 * 64 * 3
    feed.close()


def test_ranks_that_share_a_gpu_read_for_each_other(folder: Path) -> None:
    cases = ["host-shuffled", "device-shuffled", "device-given", "stream-shuffled"]
    result = run_ranks(2, "-m", "tests.data.reading", "batches", str(folder), *cases, "--cuda")
    assert result.returncode == 0, result.stderr[-3000:]
