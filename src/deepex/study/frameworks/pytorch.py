"""What the frameworks on PyTorch share: samples as tensors, the optimiser, the loss of a batch, validation.

data = TorchData(task, channels_last=True)
for step in data.steps(epoch):
    loss = data.loss(network(...), ...)
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

from deepex.arena.mode import begin_training, evaluating
from deepex.study.frameworks.base import Sums
from deepex.study.frameworks.workload import Samples, Workload

_LEAST_VALIDATED: Final = 64  # a batch of validation, as DeepEx has it


class Step(NamedTuple):
    """One mini-batch of this rank: its samples' numbers, its share (see Task.shares) and the learning rate."""

    chosen: torch.Tensor
    share: float
    rate: float


@final
class TorchData:
    """This rank's samples on its device, in one order of memory."""

    def __init__(self, task: Workload, *, channels_last: bool) -> None:
        self._task, self._learnt = task, task.task
        self._bf16 = task.config.precision == "bf16"
        self.order = torch.channels_last if channels_last else torch.contiguous_format
        self.images, self.labels = self._tensors(task.train())
        self._held = self._tensors(task.validation())

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of an epoch."""
        order, lengths = self._task.plan(epoch)
        chosen = torch.from_numpy(order).to(self._task.device).split(lengths)
        return (Step(*step) for step in zip(chosen, self._task.shares, self._task.rates(epoch), strict=True))

    def sums(self) -> torch.Tensor:
        """Zeros, to sum up loss and measures in, on the device."""
        return torch.zeros(1 + len(self._learnt.measures), dtype=torch.float64, device=self._task.device)

    def precision(self) -> AbstractContextManager[object]:
        """The context in which the network runs."""
        return torch.autocast(self._task.device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def loss(self, network: nn.Module, step: Step, sums: torch.Tensor) -> torch.Tensor:
        """The loss that a step minimises; the sums take up its samples."""
        images, labels = self.images.index_select(0, step.chosen), self.labels.index_select(0, step.chosen)
        with self.precision():
            output = network(images)
        loss = self._learnt.loss(output, images, labels)
        sums[0].add_(loss.detach(), alpha=len(images))
        for total, value in zip(sums[1:], self._learnt.measure_sums(output, images, labels), strict=True):
            total.add_(value)
        return loss if step.share == 1 else loss * step.share

    @torch.inference_mode()
    def validate(self, network: nn.Module) -> tuple[Sums, float]:
        """Score this rank's slice of the validation part, and tell how long it took."""
        began, totals, (images, labels) = perf_counter(), self.sums(), self._held
        batch = max(self._task.config.batch, _LEAST_VALIDATED)
        with evaluating(network):
            for some, true in zip(images.split(batch), labels.split(batch), strict=True) if len(images) else ():
                with self.precision():
                    output = network(some)
                totals[0].add_(self._learnt.loss(output, some, true), alpha=len(some))
                for total, value in zip(totals[1:], self._learnt.measure_sums(output, some, true), strict=True):
                    total.add_(value)
        loss, *measures = totals.tolist()
        return Sums(loss=loss, measures=measures, samples=len(images)), perf_counter() - began

    def _tensors(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        given, device = torch.from_numpy(samples.images).permute(0, 3, 1, 2), self._task.device
        ready = device.type == "cpu" and self.order is torch.channels_last  # as they are read
        images = given if ready else torch.empty(given.shape, device=device, memory_format=self.order).copy_(given)
        return images, torch.from_numpy(samples.labels).to(device)


def own_network(task: Workload, data: TorchData) -> nn.Module:
    """A copy of the task's network on the device, in the samples' order of memory."""
    network: Any = copy.deepcopy(task.network)  # whose `to` mypy does not know whole
    copied: nn.Module = network.to(task.device, memory_format=data.order)
    return begin_training(copied)


def make_sgd(network: nn.Module, task: Workload) -> torch.optim.SGD:
    """PyTorch's fastest SGD, with weight decay on the parameters that DeepEx decays."""
    optim, named = task.config.optim, dict(network.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name in task.decayed], "weight_decay": optim.weight_decay},
        {"params": [p for name, p in named.items() if name not in task.decayed], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    rate = task.rates(0)[0]
    return torch.optim.SGD(kept, lr=rate, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Go on with another learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def settle(task: Workload) -> None:
    """Set the switches of this process as DeepEx sets them for a run."""
    config = task.config
    torch.set_num_threads(task.threads)
    strictness = "warn" if task.device.type == "cuda" else "error"
    torch.set_deterministic_debug_mode(strictness if config.deterministic else "default")
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
    torch.manual_seed(config.seed + task.comm.rank)  # noise of a network: other on every rank
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
