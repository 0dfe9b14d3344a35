"""The arithmetic is right: against a slow reference, against large-batch SGD, and on any number of ranks."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.data.feeds.order import epoch_order
from deepex.data.feeds.shard import Shards
from deepex.recipes.network import build_network
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig
from tests.full import examples
from tests.pool import RankPool
from tests.training.many import WAYS, train_all
from tests.training.reference import train_reference

MakeData = Callable[[int], Path]


def train(config: RunConfig, out: Path) -> dict[str, torch.Tensor]:
    deepex.train(config, SoloCommunicator(), out=out)
    return load_file(out / "weights.safetensors")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            difference = (found[name].double() - value).norm() / value.norm().clamp_min(1e-3)
            assert difference < tolerance, (name, difference)


@pytest.mark.parametrize("momentum", ["average", "reset", "local"])
@pytest.mark.parametrize("period", [3, "epoch", "2 per epoch"])
def test_weights_match_the_reference(period: int | str, momentum: str, make_data: MakeData, tmp_path: Path) -> None:
    """3 replicas on 49 samples: shards of 17, 16, 16 with batch 8, so one replica has a step of one sample that the others lack."""
    config = RunConfig(
        net="tests.networks:plain", data=str(make_data(49)), epochs=3, batch=8, replicas=3, validate="none",
        optim=OptimConfig(rate=0.05, momentum=0.9, weight_decay=0.01, nesterov=momentum == "local"),
        sync=SyncConfig(period=period, momentum=momentum),
    )  # fmt: skip
    assert_close(train(config, tmp_path / "run"), train_reference(config, 3))


def test_batch_norm_statistics_are_averaged(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.networks:batch_normed", data=str(make_data(50)), epochs=2, batch=8, replicas=3, validate="none",
        optim=OptimConfig(rate=0.02), sync=SyncConfig(period=2),
    )  # fmt: skip
    assert_close(train(config, tmp_path / "run"), train_reference(config, 3), tolerance=1e-4)


@pytest.mark.parametrize("replicas", [1, 3])
def test_buffers_that_a_network_replaces_are_averaged_too(replicas: int, make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.networks:counting", data=str(make_data(49)), epochs=2, batch=8, replicas=replicas, validate="none",
        optim=OptimConfig(rate=0.02), sync=SyncConfig(period=2),
    )  # fmt: skip
    found, expected = train(config, tmp_path / "run"), train_reference(config, replicas)
    assert expected["mean"].abs() > 0.01
    assert_close(found, expected, tolerance=1e-4)
    assert found["count"] == expected["count"]


def test_gradients_match_the_reference(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.networks:batch_normed", data=str(make_data(49)), epochs=2, batch=8, replicas=3, validate="none",
        optim=OptimConfig(rate=0.02, weight_decay=0.01), sync=SyncConfig(strategy="gradients"),
    )  # fmt: skip
    assert_close(train(config, tmp_path / "run"), train_reference(config, 3), tolerance=1e-4)


@pytest.mark.parametrize("sync", [SyncConfig(period=1), SyncConfig(period=1, momentum="local"), SyncConfig(strategy="gradients")])
def test_period_one_is_large_batch_sgd(sync: SyncConfig, make_data: MakeData, tmp_path: Path) -> None:
    """4 replicas with batch 8 against torch.optim.SGD with batch 32 on the same samples."""
    config = RunConfig(
        net="tests.networks:plain", data=str(make_data(64)), epochs=3, batch=8, replicas=4, validate="none",
        optim=OptimConfig(rate=0.05, momentum=0.9), sync=sync,
    )  # fmt: skip
    dataset = PackedDataset.open(Path(config.data))
    images, labels = (torch.from_numpy(array) for array in dataset.part("train").read(0, 64))
    manifest = dataset.manifest
    inputs = (images.permute(0, 3, 1, 2).float() / 255 - manifest.mean[0]) / manifest.deviation[0]
    network = build_network(config, manifest)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    shards = Shards(64, 4, 8)
    for epoch in range(3):
        keys = {"seed": 1, "epoch": epoch, "sample_bytes": manifest.sample_bytes}
        orders = [epoch_order(shards.bounds(r), dataset.part("train").bounds, replica=r, **keys) for r in range(4)]
        for step in range(shards.steps):
            batch = torch.from_numpy(np.concatenate([order[step * 8 : step * 8 + 8] for order in orders]))
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
            optimiser.step()
    assert_close(train(config, tmp_path / "run"), network.state_dict(), tolerance=2e-6 * 10)


def test_one_replica_is_plain_sgd_to_the_last_bit_of_its_data_order(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.networks:plain", data=str(make_data(50)), epochs=2, batch=8, validate="none",
        optim=OptimConfig(rate=0.05, momentum=0.9, weight_decay=0.01),
    )  # fmt: skip
    assert_close(train(config, tmp_path / "run"), train_reference(config, 1))


@pytest.fixture(scope="module")
def on_ranks(ranks: RankPool, make_data: MakeData, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The ways of tests.training.many on 1, 2 and 4 ranks; 130 samples on 8 replicas, so shards differ."""
    folder = tmp_path_factory.mktemp("ranks")
    for size in (1, 2, 4):
        ranks.run(train_all, make_data(130), folder / str(size), size=size)
    return {size: folder / str(size) for size in (1, 2, 4)}


@pytest.mark.ranks
@pytest.mark.parametrize("way", [name for name, (_, deterministic) in WAYS.items() if deterministic])
def test_deterministic_bits_do_not_depend_on_ranks(way: str, on_ranks: dict[int, Path]) -> None:
    files = [(folder / way / "weights.safetensors").read_bytes() for folder in on_ranks.values()]
    assert len({hashlib.sha256(content).hexdigest() for content in files}) == 1


@pytest.mark.ranks
def test_ranks_change_only_the_rounding(on_ranks: dict[int, Path]) -> None:
    one, two, four = (load_file(folder / "rounded" / "weights.safetensors") for folder in on_ranks.values())
    for other in (two, four):
        assert_close(other, {name: value.double() for name, value in one.items()}, tolerance=1e-5)


def test_seed_decides_and_another_seed_differs(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(net="tests.networks:normed", data=str(make_data(49)), epochs=1, batch=8, validate="none", deterministic=True)
    first, again = train(config, tmp_path / "a"), train(config, tmp_path / "b")
    other = train(RunConfig(**{**config.__dict__, "seed": 2}), tmp_path / "c")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


@pytest.mark.slow
def test_many_replicas_on_one_rank(tmp_path: Path) -> None:
    """Up to 1,536 replicas of LeNet, on the shipped 6,000 images: three or four images each."""
    replicas = examples(192, 1536)
    samples = 6000 * replicas // 1536
    keys = {"replicas": replicas, "samples": samples, "batch": 3, "epochs": 1, "validate": "none", "net": "lenet", "threads": 1}
    run = deepex.train(deepex.recipe("fashion", keys), SoloCommunicator(), out=tmp_path / "run")
    (epoch,) = run.epochs()
    assert (epoch.samples, epoch.steps, epoch.syncs) == (samples, 2, 1)
    assert epoch.train.loss < 2.5
