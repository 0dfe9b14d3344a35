"""What can only be seen on a GPU. Run with `make test-gpu`; CI has none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.data.feeds.placement import Placement, make_feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.recipes.network import build_network
from deepex.record import PHASES, RunDirectory
from deepex.training.build import build
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from deepex.training.session import run_stretch
from tests.mpi import run_deepex, run_ranks

MakeData = Callable[[int], Path]
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a GPU"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_learns_on_the_gpu(precision: str, tmp_path: Path) -> None:
    run = deepex.train(deepex.recipe("fashion", {"epochs": 3, "precision": precision}), SoloCommunicator(), out=tmp_path / "run")
    last = run.epochs()[-1]
    assert run.state["device"] == "cuda"
    assert last.validation.get("error") < 0.25
    phases = sum(last.phase_seconds(name) for name in PHASES)
    assert 0.5 * last.seconds < phases <= 1.05 * last.seconds, "device events account for the epoch"


@pytest.mark.parametrize("kind", ["device", "host", "stream"])
def test_placements_hand_out_the_same_batches(kind: str, make_data: MakeData) -> None:
    part = PackedDataset.open(make_data(192)).part("train")
    expected = _batches("device", part, torch.device("cpu"))
    found = _batches(kind, part, CUDA)
    assert len(found) == len(expected) == 48
    for (images, labels), (reference, reference_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, reference)
        assert torch.equal(labels, reference_labels)


def _batches(kind: str, part: object, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch of two epochs, each used by a slow kernel before it is read: an early overwrite of the slot would show."""
    feed = make_feed(Placement(kind=kind, reason=""), Samples(part, Shards(192, 1, 8), range(1), seed=1, shuffled=True), device)
    batches = []
    for epoch in range(2):
        feed.begin(epoch, [Turn(0, 0, 24)])
        for _ in range(24):
            images, labels = feed.next()
            if device.type == "cuda":
                torch.cuda._sleep(2_000_000)
            batches.append((images.clone(), labels.clone()))
    feed.close()
    return [(images.cpu(), labels.cpu()) for images, labels in batches]


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sync.strategy": "gradients"},
        {"replicas": 4, "sync.period": 3},
        {"replicas": 4, "sync.strategy": "background", "sync.period": 2},
    ],
)
def test_no_device_synchronisation_within_an_epoch(changes: dict, placement: str, make_data: MakeData, tmp_path: Path) -> None:
    config = deepex.recipe("fashion", {"data": str(make_data(192)), "batch": 8, "placement": placement, **changes})
    comm = SoloCommunicator()
    learner = Learner(build(make_job(config, comm, build_network), comm))
    for epoch in range(2):  # the first warms up: cuDNN plans and events are made
        learner.begin_epoch(epoch, 0)
        torch.cuda.set_sync_debug_mode("error" if epoch else "default")
        try:
            for stretch in learner.stretches():
                run_stretch(learner, stretch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    learner.parts.close()
    assert all(seconds >= 0 for seconds in learner.parts.clock.seconds().values())


def test_memory_of_a_rank(make_data: MakeData, tmp_path: Path) -> None:
    """Weights, gradients, momentum and the shard, and no hidden copy of the arena."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = deepex.recipe("fashion-resnet", {"data": str(make_data(192)), "batch": 8})
    comm = SoloCommunicator()
    parts = build(make_job(config, comm, build_network), comm)
    arena, shard = parts.arena, 192 * (28 * 28 + 8)
    assert arena.memory.nbytes < 1.02 * 3 * 4 * arena.num_parameters
    assert torch.cuda.memory_allocated() - before < arena.memory.nbytes + 2 * shard + (2 << 20)


@pytest.mark.parametrize("kind", ["mpi", "staged", "gloo"])
def test_collectives_of_ranks_that_share_a_gpu(kind: str) -> None:
    result = run_ranks(2, "-m", "tests.gpu.ranks", kind)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)


def test_nccl_on_one_rank() -> None:
    """NCCL wants a GPU per rank; with one GPU that is one rank."""
    result = run_ranks(1, "-m", "tests.gpu.ranks", "nccl")
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("sync", ["weights", "background"])
@pytest.mark.parametrize("step", ["eager", "captured"])
def test_ranks_change_only_the_rounding(step: str, sync: str, make_data: MakeData, tmp_path: Path) -> None:
    options = [f"data={make_data(192)}", "batch=8", "epochs=2", "net=lenet", f"step={step}", f"sync={sync}", "sync.period=2"]
    settings = [f"--set={option}" for option in options]
    for ranks in (1, 2):
        result = run_deepex("train", "fashion", f"--ranks={ranks}", "--replicas=2", f"--out={tmp_path / str(ranks)}", *settings)
        assert result.returncode == 0, result.stderr[-3000:]
    one, two = (RunDirectory.open(tmp_path / ranks) for ranks in ("1", "2"))
    assert two.state["comm"]["kind"] == "mpi"
    assert two.state["step"]["kind"] == step
    assert "share 1 GPU" in two.state["comm"]["reason"]
    assert two.epochs()[-1].train.loss == pytest.approx(one.epochs()[-1].train.loss, rel=1e-3)


def test_the_record_has_what_the_gpu_used(tmp_path: Path) -> None:
    """Some seconds of work: the driver's counters move a few times a second."""
    config = deepex.recipe("fashion", {"net": "resnet18", "epochs": 20, "sampling": 0.05, "batch": 128})
    run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    epochs, (lines,) = run.epochs(), run.resources().values()
    assert all(list(epoch.usage["gpu_joules"]) == ["epoch"] for epoch in epochs), "the host does not know the device's phase"
    assert 10 < sum(epoch.usage["joules"]["epoch"][0] for epoch in epochs) / lines[-1]["seconds"] < 3000
    assert 0 < sum(epoch.usage["gpu_busy_seconds"]["epoch"][0] for epoch in epochs) <= 1.01 * lines[-1]["seconds"]
    assert epochs[-1].usage["gpu_memory_bytes"]["epoch"][0] > 100e6
