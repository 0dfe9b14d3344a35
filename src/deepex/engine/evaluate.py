"""Validation with agreed weights: the forward phase alone, by all ranks in parallel or on rank 0 as in the paper.

evaluator = Evaluator(dataset.part("validation"), comm, step, …)
evaluator.sums()        # loss, tally and samples of this rank's part; the caller adds them over the ranks
"""

import torch
from torch import nn

from deepex.comm import Communicator
from deepex.data.dataset import PackedPart
from deepex.engine.objective import Objective
from deepex.engine.step import EagerStep


class Evaluator:
    """Scores the network on a part of the dataset. `cached` keeps this rank's samples on the device between epochs."""

    def __init__(self, part: PackedPart, comm: Communicator, *, how: str, batch: int, device: torch.device, cached: bool) -> None:
        ranks, rank = (comm.size, comm.rank) if how == "parallel" else (1, 0)
        idle = how == "rank0" and comm.rank != 0
        self._start, self._stop = (0, 0) if idle else (rank * part.count // ranks, (rank + 1) * part.count // ranks)
        self._part, self._batch, self._device = part, batch, device
        self._cache = self._load(self._start, self._stop) if cached else None

    @torch.no_grad()
    def sums(self, network: nn.Module, step: EagerStep, objective: Objective) -> list[float]:
        """Loss, tally and samples over this rank's part. The network is left in training mode."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        network.eval()
        try:
            for start in range(self._start, self._stop, self._batch):
                raw, labels = self._samples(start, min(start + self._batch, self._stop))
                images = step.prepare(raw)
                with step.precision():
                    output = network(images)
                totals[0].add_(objective.loss(output, images, labels), alpha=len(images))
                totals[1].add_(objective.tally(output, images, labels))
        finally:
            network.train()
        return [*totals.tolist(), float(self._stop - self._start)]

    def _samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cache is None:
            return self._load(start, stop)
        images, labels = self._cache
        return images[start - self._start : stop - self._start], labels[start - self._start : stop - self._start]

    def _load(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._part.read(start, stop)
        return torch.from_numpy(images).to(self._device), torch.from_numpy(labels).to(self._device)
