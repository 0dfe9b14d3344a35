"""The contract of a peer, and what those in PyTorch share: the samples on the device, and the loss of a batch of them."""

import copy
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import nn
from torch.nn import functional

from deepex.task import make_task
from peers.workload import PADDING, Workload


class Peer(ABC):
    """Trains the workload, an epoch per call. `setup_seconds` is what compilation, capture and the first steps took.

    What torch.compile made for an earlier peer of the same shapes is used again: only the first one's set-up is a fresh process's.
    """

    num_samples: int
    setup_seconds: float

    @abstractmethod
    def epoch(self) -> None:
        """Queue one epoch over all full batches; on a GPU, it may still run when this returns."""

    @abstractmethod
    def loss(self) -> float:
        """The last step's loss; waits for it."""

    def close(self) -> None:
        """Drop all that the peer holds on the device."""
        self.__dict__.clear()


@final
class Samples:
    """The dataset on its device. `draw` makes the random choices of an epoch at once, because small kernels cost a launch each.

    The images are padded once, so that sample, crop and flip are one gather.
    """

    def __init__(self, workload: Workload, images: torch.Tensor, labels: torch.Tensor) -> None:
        channels, height, width = workload.shape
        if tuple(images.shape) != (workload.count, height, width, channels) or images.dtype != torch.uint8:
            raise ValueError(f"{images.dtype} images {tuple(images.shape)} are not the uint8 (count, H, W, C) of {workload}")
        self._workload, self.device = workload, images.device
        self._standardise = workload.task == "classify"
        self._scale, self._shift = _standard(images) if self._standardise else (None, None)
        sides = (0, 0, PADDING, PADDING, PADDING, PADDING)
        self._images = functional.pad(images, sides) if workload.augment else images
        self._labels = labels
        self._rows, self._columns = (torch.arange(length, device=self.device) for length in (height, width))

    def draw(self) -> torch.Tensor:
        """A plan of the epoch (steps, 4, batch): the samples in a new order, and each one's top, left and flip."""
        kind = {"device": self.device}
        order = torch.randperm(self._workload.count, **kind)[: self._workload.num_samples]
        corners = torch.randint(0, 2 * PADDING + 1, (2, len(order)), **kind)
        flips = torch.randint(0, 2, (1, len(order)), **kind)
        plan = torch.cat([order[None], corners, flips])
        return plan.view(4, -1, self._workload.batch).transpose(0, 1).contiguous()

    def batch(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs in float32, channels-last, and labels, of one row of a plan."""
        chosen, top, left, flip = row.unbind(0)
        if self._workload.augment:
            columns = torch.where(flip[:, None] > 0, self._columns.flip(0), self._columns) + left[:, None]
            rows = self._rows + top[:, None]
            raw = self._images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            raw = self._images.index_select(0, chosen)
        inputs = raw * self._scale + self._shift if self._standardise else raw / 255
        # The view comes last: with one channel, arithmetic on it would lose the strides that mean channels-last to convolutions.
        return inputs.permute(0, 3, 1, 2), self._labels.index_select(0, chosen)


@final
class BatchLoss(nn.Module):
    """From a row of a plan to the loss of its batch: in one module, so that a compiler sees it whole. The caller sets autocast."""

    def __init__(self, workload: Workload, samples: Samples, network: nn.Module) -> None:
        super().__init__()
        self.samples, self.task = samples, make_task(workload.task)
        self.network = copy.deepcopy(network).to(samples.device, memory_format=torch.channels_last).train()

    def forward(self, row: torch.Tensor, number: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss of `row`, or of row `number` of a whole plan, where `number` is on the device."""
        if number is not None:
            row = row.index_select(0, number).squeeze(0)
        inputs, labels = self.samples.batch(row)
        return self.task.loss(self.network(inputs), inputs, labels)


def settle() -> None:
    """The global settings that every peer in PyTorch wants."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 256  # all peers compile the same code; past the limit it would run eagerly


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _standard(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor and offset per channel that give uint8 samples mean 0 and deviation 1; in parts, for the sake of memory."""
    sums = torch.zeros(2, images.shape[-1], dtype=torch.float64, device=images.device)
    for part in images.split(256):
        values = part.flatten(0, 2).float()
        sums += torch.stack([values.sum(0, dtype=torch.float64), values.square().sum(0, dtype=torch.float64)])
    mean, square = sums / images[..., 0].numel()
    deviation = (square - mean.square()).clamp(min=1.0).sqrt()
    return (1 / deviation).float(), (-mean / deviation).float()
