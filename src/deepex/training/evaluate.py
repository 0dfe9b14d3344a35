"""Validation with agreed weights: the forward phase alone, by all ranks in parallel or on rank 0 as in the paper.

evaluator = Evaluator(dataset.part("validation"), comm, how="parallel", batch=64, device=device, placement=placement, verify=True)
evaluator.sums(network, step, task)    # of loss, measures and samples, over this rank's part; the caller adds over the ranks
"""

import torch
from torch import nn

from deepex.arena.mode import evaluating
from deepex.comm import Communicator
from deepex.data.feeds.feed import Feed
from deepex.data.feeds.placement import Placement, make_feed
from deepex.data.feeds.samples import SampleFiles, Samples, Turn
from deepex.data.feeds.shard import Slices
from deepex.step.eager import EagerStep
from deepex.task.task import Task


class Evaluator:
    """Scores the network on a part of the dataset, whose samples are placed as those for training are.

    They are read when they are first needed, and checked then. The first call of `sums` is collective.
    """

    def __init__(
        self,
        part: SampleFiles,
        comm: Communicator,
        *,
        how: str,
        batch: int,
        device: torch.device,
        placement: Placement,
        verify: bool,
    ) -> None:
        self._device, self._placement, self._verify = device, placement, verify
        self._comm = comm if how == "parallel" else None
        ranks, rank = (comm.size, comm.rank) if how == "parallel" else (1, 0)
        idle = how == "rank0" and comm.rank != 0
        slices = Slices(part.count, ranks, batch)
        self._samples = Samples(part, slices, range(0) if idle else range(rank, rank + 1), seed=None, shuffled=True)
        self._feed: Feed | None = None
        self._rounds = 0

    @torch.no_grad()
    def sums(self, network: nn.Module, step: EagerStep, task: Task) -> list[float]:
        """Loss, sums of the measures and samples over this rank's part. Each of its layers is left in the mode it was in."""
        totals = torch.zeros(1 + len(task.measures), dtype=torch.float64, device=self._device)
        feed = self._begin()
        with evaluating(network):
            while True:
                try:
                    raw, labels = feed.next()
                except StopIteration:
                    break
                images = step.prepare(raw)
                with step.precision():
                    output = network(images)
                totals[0].add_(task.loss(output, images, labels), alpha=len(images))
                for total, value in zip(totals[1:], task.measure_sums(output, images, labels), strict=True):
                    total.add_(value)
        return [*totals.tolist(), float(self._samples.count)]

    def close(self) -> None:
        """Stop what reads."""
        if self._feed is not None:
            self._feed.close()

    def _begin(self) -> Feed:
        if self._feed is None:
            self._feed = make_feed(self._placement, self._samples, self._device, comm=self._comm, verify=self._verify)
        self._feed.begin(self._rounds, [Turn(replica, 0, self._samples.count) for replica in self._samples.replicas])
        self._rounds += 1
        return self._feed
