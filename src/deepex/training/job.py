"""What is trained on this rank: the plan, and what its names stand for here."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from deepex.data.feeds.placement import Placement
from deepex.data.feeds.shard import Shards
from deepex.data.find import OpenDataset
from deepex.training.config import RunConfig
from deepex.training.settle import Facts, Plan, settle


@dataclass(frozen=True, kw_only=True)
class Job:
    """A network, initialised; a dataset, opened; a device; and the plan, which follows from what was `asked` for and the facts.

    `begun`: how the steps of a run that goes on were run before; empty if it does not matter. `moving`: frozen tensors that the
    network itself changes.
    """

    asked: RunConfig
    facts: Facts
    plan: Plan
    network: nn.Module
    dataset: OpenDataset
    device: torch.device
    begun: str = ""
    moving: frozenset[str] = frozenset()

    def settled(self, facts: Facts) -> "Job":
        """The same, with a plan that follows from more facts."""
        return replace(self, facts=facts, plan=settle(self.asked, facts))

    @property
    def config(self) -> RunConfig:
        """The configuration, settled."""
        return self.plan.config

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self.plan.replicas

    @property
    def shards(self) -> Shards:
        """How the training samples are split over the replicas."""
        return self.plan.shards

    @property
    def placement(self) -> Placement:
        """Where the samples live."""
        return self.plan.placement

    @property
    def channels_last(self) -> bool:
        """Whether images lie so in memory."""
        return self.plan.channels_last

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """What the network sees of a sample: (channels, height, width), after a crop."""
        channels, height, width = self.dataset.manifest.shape
        return (channels, *self.config.augment.size(height, width))

    @property
    def data_path(self) -> str:
        """Where the dataset is, wherever the run goes on."""
        data = self.config.data
        return data if data.startswith("sample:") else str(Path(data).resolve())
