"""What is trained: a complete configuration, and what its names stand for on this rank."""

from dataclasses import dataclass

import torch
from torch import nn

from deepex.data.dataset import PackedDataset
from deepex.data.direct import Hdf5Dataset
from deepex.data.feeds.placement import Placement
from deepex.data.feeds.shard import Shards
from deepex.errors import ConfigError
from deepex.training.config import RunConfig

OpenDataset = PackedDataset | Hdf5Dataset


@dataclass(frozen=True, kw_only=True)
class Job:
    """A network, initialised; a dataset, opened; a device; and how `replicas` share them.

    `begun`: how the steps of a run that goes on were run before; empty if it does not matter. `sync_reason`: why replicas agree as
    they do.
    """

    config: RunConfig
    network: nn.Module
    dataset: OpenDataset
    device: torch.device
    placement: Placement
    replicas: int
    channels_last: bool
    begun: str = ""
    sync_reason: str = "asked for"
    moving: frozenset[str] = frozenset()  # frozen tensors that the network itself changes

    @property
    def shards(self) -> Shards:
        """How the training samples are split over the replicas."""
        return split(self.config, self.dataset, self.replicas)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """What the network sees of a sample: (channels, height, width), after a crop."""
        channels, height, width = self.dataset.manifest.shape
        return (channels, *self.config.augment.size(height, width))


def split(config: RunConfig, dataset: OpenDataset, replicas: int) -> Shards:
    """Split the training samples that the run has over its replicas."""
    there = dataset.part("train").count
    if config.samples > there:
        raise ConfigError(f"samples is {config.samples}, but {dataset.directory} has {there} to train on: set at most that, or 0")
    return Shards(config.samples or there, replicas, config.batch)
