"""What the ranks of a node read for each other: `mpiexec -n 2 python -m tests.data.reading WHAT DATA KIND-ORDER[-unverified]…`,
or as a job of the pool. `--nodes=2+1` spreads three ranks over two nodes.

Rank 0 tells what the cases gave, rank by rank. `batches`: all ranks train two epochs, and tell which files they opened how often,
and how much each request asked for. `failure`: what `next` raised.
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from deepex.comm import Communicator
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.together import abort_on_failure
from deepex.data.dataset import PackedDataset
from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.feed import Feed
from deepex.data.feeds.order import dataset_order, epoch_order
from deepex.data.feeds.placement import Placement, make_feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.feeds.shard import Shards
from deepex.errors import DeepexError

REPLICAS = 6
BATCH = 8
DEVICE = torch.device("cuda" if "--cuda" in sys.argv else "cpu")


def make(kind: str, samples: Samples, comm: Communicator | None, *, verify: bool) -> Feed:
    if kind == "device":  # also on a CPU, where a run would take the host's cache
        return DeviceFeed(samples, DEVICE, comm, verify=verify)
    return make_feed(Placement(kind=kind, reason=""), samples, DEVICE, comm=comm, verify=verify)


opened, requests = Counter[str](), list[int]()
watched: list[Path] = []  # one, or none


@cache
def _listen() -> None:
    """Count which files of the folder that is watched are opened: for good, since Python keeps such hooks."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watched and event == "open" and isinstance(arguments[0], str) and Path(arguments[0]).parent == watched[0]:
            opened[Path(arguments[0]).name] += 1

    sys.addaudithook(note)


@contextmanager
def _watching(folder: Path) -> Iterator[None]:
    """Count which files of the folder are opened, and note the size of each request."""
    original = os.preadv

    def preadv(file: int, views: list[memoryview], offset: int) -> int:
        requests.append(sum(map(len, views)))
        return original(file, views, offset)

    _listen()
    watched[:] = [folder]
    try:
        with mock.patch.object(os, "preadv", preadv):
            yield
    finally:
        watched.clear()


def batches(comm: Communicator, folder: Path, kind: str, *, shuffled: bool, verify: bool) -> list[Any]:
    part = PackedDataset.open(folder).part("train")
    images, labels = part.read(0, part.count)
    part = PackedDataset.open(folder).part("train")
    shards, per_rank = Shards(part.count, REPLICAS, BATCH), REPLICAS // comm.size
    replicas = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    opened.clear()
    requests.clear()
    samples = Samples(part, shards, replicas, seed=3, shuffled=shuffled)
    feed = make(kind, samples, comm, verify=verify)
    half = shards.steps // 2
    for epoch in range(2):
        turns = [Turn(replica, *segment) for segment in ((0, half), (half, shards.steps)) for replica in replicas]
        feed.begin(epoch, turns)
        for replica, start, stop in turns:
            order = _order(part, shards, replica, epoch, shuffled=shuffled)
            for step in range(start, min(stop, -(-len(order) // BATCH))):
                found = [tensor.cpu().numpy() for tensor in feed.next()]
                positions = order[step * BATCH : (step + 1) * BATCH]
                assert (found[0] == images[positions]).all()
                assert (found[1] == labels[positions]).all()
    feed.close()
    return [dict(opened), list(requests)]


def failure(comm: Communicator, folder: Path, kind: str, *, shuffled: bool, verify: bool) -> str:
    part = PackedDataset.open(folder).part("train")
    per_rank = REPLICAS // comm.size
    replicas = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    samples = Samples(part, Shards(part.count, REPLICAS, BATCH), replicas, seed=3, shuffled=shuffled)
    feed, said = make(kind, samples, comm, verify=verify), ""
    feed.begin(0, [Turn(replica, 0, samples.shards.steps) for replica in replicas])  # type: ignore[attr-defined]
    try:
        while True:
            feed.next()
    except StopIteration:
        said = "no error"
    except DeepexError as error:
        said = f"{type(error).__name__}: {error}"
    feed.close()
    return said


def _order(part: Any, shards: Shards, replica: int, epoch: int, *, shuffled: bool) -> np.ndarray:
    keys: Any = {"seed": 3, "replica": replica, "epoch": epoch, "sample_bytes": int(np.prod(part.sample_shape))}
    if shuffled:
        return epoch_order(shards.bounds(replica), part.bounds, **keys)
    bounds = np.array([0, part.count])
    return dataset_order(part.count, seed=3)[epoch_order(shards.bounds(replica), bounds, **keys)]


def work(words: list[str], comm: Communicator) -> dict[str, list[Any]]:
    """Do one WHAT with its cases."""
    what, data, *cases = (word for word in words if not word.startswith("--"))
    place, rows = comm.place, {}
    if "--nodes=2+1" in words:  # as if the last of three ranks were alone on another node
        local = {"node": comm.rank // 2, "local_rank": comm.rank % 2, "local_size": 2 - comm.rank // 2}
        comm.place = dataclasses.replace(place, num_nodes=2, **local)
    with _watching(Path(data)):
        for case in cases:
            kind, order, *unverified = case.split("-")
            does = {"batches": batches, "failure": failure}[what]
            rows[case] = comm.gather(does(comm, Path(data), kind, shuffled=order == "shuffled", verify=not unverified))
    comm.place = place
    return rows


def read_on_ranks(comm: Any, words: list[str]) -> dict[str, list[Any]]:
    """As a job of the pool."""
    ours = MpiCommunicator(comm)
    found = work(words, ours)
    ours.close()
    return found


if __name__ == "__main__":
    complain = partial(print, file=sys.stderr, flush=True)
    ranks = MpiCommunicator()
    with abort_on_failure(ranks, complain, complain):  # or the other ranks would wait for one that found something wrong
        found = work(sys.argv[1:], ranks)
    if ranks.rank == 0:
        print(json.dumps(found))
