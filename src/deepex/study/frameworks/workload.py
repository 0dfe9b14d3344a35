"""What every framework gets: the configuration, the network as DeepEx initialises it, and this rank's samples in memory.

    task = make_task(config, comm, threads=1)
    task.train().images             # float32 (n, height, width, channels), standardised as DeepEx does; read anew
    order, lengths = task.plan(3)   # which samples of the shard the steps of an epoch see

All ranks make the same number of steps. A rank whose shard ends a step before the others' makes one of its last sample alone, so
that every sample is seen once and nobody waits for a step that does not come; `share` weighs batches by their sizes.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deepex.arena.arena import Arena
from deepex.arena.mode import begin_training
from deepex.arena.schedule import Schedule
from deepex.comm import Communicator
from deepex.data.dataset import PackedDataset
from deepex.data.feeds.order import epoch_order
from deepex.data.feeds.shard import Shards, Slices
from deepex.data.manifest import Manifest
from deepex.data.prepare import Prepare
from deepex.errors import ConfigError, DataError
from deepex.machine.hardware import describe_memory
from deepex.recipes.network import build_network
from deepex.task import make_task
from deepex.task.task import Task
from deepex.training.config import RunConfig
from deepex.training.gather import make_job


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images (n, height, width, channels) as the network takes them, in float32, and their labels."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained on this rank, and how it shares the work with the others."""

    config: RunConfig
    comm: Communicator
    threads: int
    device: torch.device
    network: nn.Module
    shards: Shards
    dataset: PackedDataset

    @property
    def manifest(self) -> Manifest:
        """What the samples are."""
        return self.dataset.manifest

    def train(self) -> Samples:
        """This rank's shard, read anew: nobody else holds it."""
        return self._read("train", self.shards.bounds(self.comm.rank))

    def validation(self) -> Samples:
        """This rank's slice of the validation part, read anew."""
        span = held_out(self.config, self.dataset, self.comm)
        return self._read("validation" if span[1] else "train", span)

    @property
    def task(self) -> Task:
        """What is learnt."""
        return make_task(self.config.task)

    @property
    def steps(self) -> int:
        """Steps of an epoch, on every rank."""
        return self.shards.steps

    def plan(self, epoch: int) -> tuple[NDArray[np.int64], list[int]]:
        """This rank's samples, as numbers within its shard, in the order of an epoch; and the sizes of its steps."""
        rank, span = self.comm.rank, self.shards.bounds(self.comm.rank)
        keys = {"seed": self.config.seed, "replica": rank, "epoch": epoch, "sample_bytes": self.manifest.sample_bytes}
        return epoch_order(span, self.dataset.part("train").bounds, **keys) - span[0], self.lengths(rank)

    def lengths(self, rank: int) -> list[int]:
        """The samples of each step of a rank."""
        return step_lengths(self.shards.size(rank), self.config.batch, self.steps)

    @cached_property
    def totals(self) -> list[int]:
        """The samples of each step, of all ranks together."""
        return [sum(lengths) for lengths in zip(*(self.lengths(rank) for rank in range(self.comm.size)), strict=True)]

    @cached_property
    def shares(self) -> list[float]:
        """What to multiply a step's mean loss by, so that the plain mean over ranks weighs every sample alike."""
        return [n * self.comm.size / total for n, total in zip(self.lengths(self.comm.rank), self.totals, strict=True)]

    def rates(self, epoch: int) -> list[float]:
        """The learning rate of each step."""
        total = self.config.batch * self.comm.size
        rate = Schedule(self.config.optim, epochs=self.config.epochs, total_batch=total).during(self.steps)
        return [rate(epoch, step) for step in range(self.steps)]

    @cached_property
    def decayed(self) -> frozenset[str]:
        """The parameters that weight decay applies to, as DeepEx has it."""
        layout = Arena(copy.deepcopy(self.network), torch.device("cpu")).layout
        return frozenset(slot.name for slot in layout.decayed)

    def _read(self, name: str, span: tuple[int, int]) -> Samples:
        raw, labels = self.dataset.part(name).read(*span)
        standardise = self.task.standardise
        prepare = Prepare(self.manifest, torch.device("cpu"), standardise=standardise, channels_last=True)
        return Samples(images=prepare(torch.from_numpy(raw)).permute(0, 2, 3, 1).numpy(), labels=labels)


def step_lengths(size: int, batch: int, steps: int) -> list[int]:
    """Cut a shard of `size` samples into `steps` steps: full ones, and what is left."""
    lengths = [min(batch, size - start) for start in range(0, size, batch)]
    if len(lengths) < steps:
        lengths[-1:] = [lengths[-1] - 1, 1]
    return lengths


def make_workload(config: RunConfig, comm: Communicator, *, threads: int) -> Workload:
    """Open, check and read what the configuration names."""
    job = make_job(config, comm, build_network)
    if not isinstance(job.dataset, PackedDataset):
        raise ConfigError(f"{config.data} is read without packing; frameworks are compared on a packed dataset: `deepex data pack`")
    shards = job.shards
    if config.batch == 1 and shards.count % comm.size:
        raise ConfigError(f"batch is 1 and {shards.count} samples are no multiple of {comm.size} ranks: set batch to 2 at least")
    mine, held = shards.bounds(comm.rank), held_out(config, job.dataset, comm)
    _check_memory(job.dataset.manifest, comm, (mine[1] - mine[0]) + (held[1] - held[0]))
    network = begin_training(job.network)
    return Workload(
        config=config, comm=comm, threads=threads, device=job.device, network=network, shards=shards, dataset=job.dataset
    )


def held_out(config: RunConfig, dataset: PackedDataset, comm: Communicator) -> tuple[int, int]:
    """This rank's slice of the validation part."""
    part = dataset.manifest.parts.get("validation")
    if part is None or config.validate == "none":
        return 0, 0
    if config.validate == "rank0":
        return (0, part.count) if comm.rank == 0 else (0, 0)
    return Slices(part.count, comm.size, config.batch).bounds(comm.rank)


def _check_memory(manifest: Manifest, comm: Communicator, count: int) -> None:
    needed, free = 4 * count * math.prod(manifest.shape), (describe_memory()["available_bytes"] or 0) // comm.place.local_size
    if free and 2 * needed > free:  # a framework makes a copy of its own
        raise DataError(
            f"{count:,} samples take {needed / 1e9:.1f} GB as float32, and {free / 1e9:.1f} GB are free for this rank: frameworks "
            "are compared on samples in memory; use more ranks or fewer samples"
        )
