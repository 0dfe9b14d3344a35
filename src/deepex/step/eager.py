"""One step's arithmetic on one replica: forward and backward into the arena's gradients.

    step = EagerStep(network, task, arena, prepare, precision="bf16")
    step.forward(raw_images, labels); step.backward(); arena.gradients

Loss and measure are summed on the device in `step.sums` and reach the host when somebody reads it, once per epoch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deepex.arena.arena import Arena
from deepex.data.prepare import Prepare
from deepex.task.task import Task

_BITS: Final = 0xFFFFFFFFFFFFFFFF


@final
class EagerStep:
    """Runs PyTorch's operators one by one, on whatever device the arena is."""

    def __init__(self, network: nn.Module, task: Task, arena: Arena, prepare: Prepare, *, precision: str) -> None:
        self._network, self._task, self._arena, self._prepare = network, task, arena, prepare
        self._compute: Callable[[torch.Tensor], Any] = network
        self._device = arena.memory.device
        self._bf16 = precision == "bf16"
        self._loss: torch.Tensor | None = None
        self.sums = torch.zeros(1 + len(task.measures), dtype=torch.float64, device=self._device)

    def use(self, compute: Callable[[torch.Tensor], Any]) -> None:
        """Compute the network's output so from now on: by its compiled code, say."""
        self._compute = compute

    def prepare(self, raw: torch.Tensor, *, train: bool = False) -> torch.Tensor:
        """Bring raw samples into the form that the network takes; to train, in random crops and flips where they are asked for."""
        return self._prepare(raw, train=train)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Compute loss and measure of a prepared batch and add them to `sums`."""
        with self.precision():
            output = self._compute(images)
        self._loss = self._task.loss(output, images, labels)
        self.sums[0].add_(self._loss.detach(), alpha=len(images))
        for total, value in zip(self.sums[1:], self._task.measure_sums(output, images, labels), strict=True):
            total.add_(value)

    def backward(self) -> None:
        """Replace the arena's gradients by those of the last batch's loss."""
        assert self._loss is not None, "backward follows forward"
        self._arena.backward(self._loss)
        self._loss = None

    def trial_seconds(self, batch: int) -> float:
        """How long a step takes, about: the second of two on an empty batch; weights and buffers are left as they were."""
        raw = torch.zeros((batch, *self._prepare.raw_shape), dtype=torch.uint8, device=self._device)
        labels = torch.zeros(batch, dtype=torch.int64, device=self._device)
        with self._arena.keeping_buffers():
            for _ in range(2):
                self._wait()
                began = perf_counter()
                self.forward(self.prepare(raw, train=True), labels)
                self.backward()
                self._wait()
            seconds = perf_counter() - began
        self.sums.zero_()
        return seconds

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def precision(self) -> AbstractContextManager[object]:
        """The context in which the network computes."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext()


def seed_step(device: torch.device, seed: int, replica: int, epoch: int, step: int) -> None:
    """Give each step of each replica its own random numbers (dropout, sampling), whoever runs it and wherever a run resumed.

    Seeding a generator takes 2 µs; the alternative, carrying generator states per replica, is neither stateless nor smaller.
    """
    value = mixed(seed, replica, epoch, step)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        generator_of(device).manual_seed(value)


def generator_of(device: torch.device) -> torch.Generator:
    """Where a network's random numbers on `device` come from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def mixed(seed: int, replica: int, epoch: int, step: int) -> int:
    """One number of 64 bits for a step."""
    return int(_mix(_mix(_mix(_mix(seed) ^ replica) ^ epoch) ^ step))


def mixed_many(seed: int, replicas: NDArray[np.uint64], epoch: int, steps: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for many steps."""
    many: NDArray[np.uint64] = _mix(_mix(_mix(_mix(seed) ^ replicas) ^ epoch) ^ steps)
    return many


def _mix(value: Any) -> Any:
    """SplitMix64's finaliser (Steele et al. 2014): neighbouring numbers in, unrelated numbers out; of one or of many."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)
