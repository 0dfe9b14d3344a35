"""Shards and feeds: every sample once, the same batches from every placement, errors from the worker in the consumer."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.data.dataset import PackedDataset
from deepex.data.feed import Feed, Samples, ThreadedFeed, Turn
from deepex.data.placement import Placement, choose_placement, make_feed
from deepex.data.prepare import Prepare
from deepex.data.shard import Shards, epoch_order
from deepex.errors import ConfigError

MakeData = Callable[[int], Path]
CPU = torch.device("cpu")


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9))
def test_shards_cover_every_sample_once(count: int, replicas: int, batch: int) -> None:
    if replicas > count // batch:
        with pytest.raises(ConfigError, match=f"at most {count // batch} replicas"):
            Shards(count, replicas, batch)
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


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9))
def test_an_epoch_is_a_permutation_that_the_seed_decides(replica: int, seed: int, epoch: int) -> None:
    shards = Shards(101, 6, 4)
    order = epoch_order(shards, replica, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(shards.size(replica)))
    assert (order == epoch_order(shards, replica, seed=seed, epoch=epoch)).all()
    assert (order != epoch_order(shards, replica, seed=seed, epoch=epoch + 1)).any()


def test_the_order_of_an_epoch_never_changes() -> None:
    """Made with numpy 2.4 on 2026-11-15; another order would break resumed runs and every comparison with older ones."""
    assert epoch_order(Shards(10, 1, 1), 0, seed=1, epoch=0).tolist() == [6, 2, 1, 0, 8, 4, 3, 9, 7, 5]


def collect(feed: Feed, turns: list[Turn], epochs: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    batches = []
    for epoch in range(epochs):
        feed.begin(epoch, turns)
        while True:
            try:
                images, labels = feed.next()
            except StopIteration:
                break
            batches.append((images.numpy().copy(), labels.numpy().copy()))
    feed.close()
    return batches


@pytest.mark.parametrize("shuffled", [True, False])
def test_every_placement_hands_out_the_same_batches(shuffled: bool, make_data: MakeData) -> None:
    part = PackedDataset.open(make_data(130)).part("train")
    shards = Shards(130, 4, 8)
    turns = [Turn(r, start, stop) for start, stop in ((0, 2), (2, 5)) for r in (2, 3)]
    found = {}
    for kind in ("device", "host", "stream"):
        samples = Samples(part, shards, range(2, 4), seed=5, shuffled=shuffled)
        found[kind] = collect(make_feed(Placement(kind=kind, reason=""), samples, CPU), turns)
    assert len(found["device"]) == 2 * sum(-(-shards.size(r) // 8) for r in (2, 3))
    for kind in ("host", "stream"):
        for (images, labels), (expected, expected_labels) in zip(found[kind], found["device"], strict=True):
            assert (images == expected).all()
            assert (labels == expected_labels).all()


def test_an_epoch_hands_out_each_sample_of_the_rank_once(make_data: MakeData) -> None:
    part = PackedDataset.open(make_data(130)).part("train")
    shards = Shards(130, 4, 8)
    samples = Samples(part, shards, range(1, 3), seed=5, shuffled=True)
    batches = collect(make_feed(Placement(kind="device", reason=""), samples, CPU), [Turn(1, 0, 5), Turn(2, 0, 5)], epochs=1)
    images = np.concatenate([batch[0] for batch in batches])
    expected, _ = part.read(shards.bounds(1)[0], shards.bounds(2)[1])
    key = lambda array: sorted(row.tobytes() for row in array)  # noqa: E731
    assert key(images) == key(expected)


def test_a_slot_is_not_overwritten_while_it_is_held(make_data: MakeData) -> None:
    """The worker runs ahead by one batch at most: what `next` gave stays as it was until `next` is called again."""
    part = PackedDataset.open(make_data(130)).part("train")
    samples = Samples(part, Shards(130, 1, 8), range(1), seed=5, shuffled=True)
    feed = make_feed(Placement(kind="host", reason=""), samples, CPU)
    feed.begin(0, [Turn(0, 0, 17)])
    for _ in range(17):
        images, _labels = feed.next()
        before = images.clone()
        torch.randn(200, 200).mm(torch.randn(200, 200))
        assert torch.equal(images, before)
    feed.close()


def test_an_error_of_the_worker_is_raised_in_the_consumer(make_data: MakeData) -> None:
    part = PackedDataset.open(make_data(130)).part("train")
    samples = Samples(part, Shards(130, 1, 8), range(1), seed=5, shuffled=True)

    def gather(positions: np.ndarray, images: np.ndarray, labels: np.ndarray) -> None:
        raise OSError("the disk is gone")

    feed = ThreadedFeed(samples, CPU, gather)
    feed.begin(0, [Turn(0, 0, 17)])
    with pytest.raises(OSError, match="the disk is gone"):
        feed.next()
    feed.close()


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


@settings(max_examples=50)
@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_placement_fits(samples: int, device: int, host: int) -> None:
    chosen = choose_placement("auto", samples_bytes=samples, device="cuda", free_device_bytes=device, free_host_bytes=host)
    assert chosen.reason
    if chosen.kind == "device":
        assert samples <= device / 2
    elif chosen.kind == "host":
        assert device / 2 < samples <= host / 2
    else:
        assert samples > max(device, host) / 2
    asked = choose_placement("stream", samples_bytes=1, device="cpu", free_device_bytes=10, free_host_bytes=10)
    assert asked.kind == "stream"
