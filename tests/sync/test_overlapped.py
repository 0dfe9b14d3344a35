"""Gradients that travel while the backward pass is at work: begun early, in one order everywhere, and the sum is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.arena import Arena
from deepex.comm import Background, Call, Communicator, WrappedCommunicator, as_communicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.errors import FailureError
from deepex.sync.how.gradients import Overlapped, _cuts
from deepex.sync.synced_slice import SyncedSlice
from tests.pool import RankPool

MakeData = Callable[[int], Path]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_cuts_cover_all_weights(counts: list[int], chunks: int) -> None:
    cuts = _cuts([(0, count) for count in counts], chunks)
    assert [k for a, b in cuts for k in range(a, b)] == list(range(len(counts)))
    assert 1 <= len(cuts) <= chunks


@pytest.fixture
def parts() -> tuple[nn.Sequential, Arena, Overlapped, Communicator, list[tuple[int, int, float]]]:
    """Six layers in three chunks; the log has each sum: where it begins, how many numbers, and its weight."""
    network = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(6)))
    arena = Arena(network, torch.device("cpu"))
    slots = tuple((slot.offset, slot.count) for slot in arena.layout.weights)
    end = arena.gradients.numel()
    held = slice(end, end + arena.buffers.numel())
    synced = SyncedSlice(agreed=arena.gradients_and_buffers, buffers=held, weights=slice(0, 0), own=held, request=end, slots=slots)
    log: list[tuple[int, int, float]] = []

    def note(call: Call) -> None:
        assert call.what == "sum"
        tensor, weight = call.arguments
        log.append((tensor.storage_offset(), tensor.numel(), weight))

    comm = WrappedCommunicator(SoloCommunicator(), note)
    agreement = Overlapped(synced, slots, chunks=3, worker=Background(comm))
    arena.listeners.append(agreement.hears)
    return network, arena, agreement, comm, log


def test_chunks_are_begun_from_the_last_within_the_backward_pass(parts: tuple) -> None:
    network, arena, agreement, comm, log = parts
    agreement.begin(0)
    agreement.expect(0.5)
    arena.backward(network(torch.randn(3, 20)).square().sum())
    size, end = arena.gradients.numel() // 3, arena.gradients.numel()
    assert log == [(2 * size, size, 0.5), (size, size, 0.5), (0, size, 0.5)], "all, before the pass was over"
    agreement.add(0, 0.5)
    agreement.reach(comm, request=1.0, rate=0.1)
    assert log[3:] == [(end, arena.buffers.numel(), 0.5)]
    assert agreement.requests == 0.5


def test_the_mean_is_that_of_a_sync_that_waits(parts: tuple) -> None:
    network, arena, agreement, comm, _ = parts
    images = torch.randn(3, 20)
    expected = [0.25 * g for g in torch.autograd.grad(network(images).square().sum(), list(network.parameters()))]
    for _ in range(2):
        agreement.begin(0)
        agreement.expect(0.25)
        arena.backward(network(images).square().sum())
        agreement.add(0, 0.25)
        agreement.reach(comm, request=0.0, rate=0.1)
        assert all(torch.allclose(a, b) for a, b in zip(arena.gradient_tensors(), expected, strict=True))


def test_weights_without_part_and_replicas_without_samples_send_all_the_same(parts: tuple) -> None:
    """Every rank begins the same sums, or the others would wait for ever."""
    network, arena, agreement, comm, log = parts
    agreement.begin(0)
    agreement.expect(1.0)
    arena.backward(network[:4](torch.randn(3, 20)).square().sum())
    assert log == [], "the last chunk is not there, and none goes before it"
    agreement.reach(comm, request=0.0, rate=0.1)
    assert len(log) == 4
    assert not arena.gradients[-400:].any()
    log.clear()
    agreement.begin(0)
    agreement.expect(0.0)
    agreement.reach(comm, request=0.0, rate=0.1)
    assert len(log) == 4
    assert not arena.gradients.any(), "what was left of the step before is not contributed again"


def test_a_gradient_in_pieces_is_refused(parts: tuple) -> None:
    _, _, agreement, _, _ = parts
    agreement.begin(0)
    for index in (5, 4):
        agreement.hears(index)
    with pytest.raises(FailureError, match=r"set sync\.chunks=1"):
        agreement.hears(5)


def train_chunks(comm: Any, kind: str, data: str, out: str) -> None:
    """Batch norm, shards of different sizes; with chunks and without."""
    ours = as_communicator(comm)
    used = ours if kind == "mpi" else DistributedCommunicator(kind, bootstrap=ours)
    for chunks in (1, 3):
        keys = {"data": data, "net": "tests.networks:batch_normed", "epochs": 2, "batch": 8, "threads": 1, "layout": "contiguous"}
        config = deepex.recipe("fashion", keys | {"sync": "gradients", "sync.chunks": chunks})
        deepex.train(config, used, out=Path(out) / str(chunks))
    used.close()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_on_two_ranks(kind: str, ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    ranks.run(train_chunks, kind, make_data(49), tmp_path)
    one, three = (load_file(tmp_path / str(chunks) / "weights.safetensors") for chunks in (1, 3))
    for name, value in one.items():
        assert torch.allclose(three[name].double(), value.double(), rtol=1e-5, atol=1e-6), name
