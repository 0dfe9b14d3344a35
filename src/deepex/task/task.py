"""What every task keeps to: the loss that is minimised, and the measures that a person reads.

task = make_task("classify")
loss = task.loss(output, images, labels)                # mean over the batch
sums = task.measure_sums(output, images, labels)        # one of each measure, on the device
task.measures[0].value(sums[0], samples)                # wrong / seen
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from deepex.record.measure import Measure


class Task(ABC):
    """A loss, and the measures that a person reads; the first is what the task is judged by.

    `standardise` says whether the network's input is standardised or in 0…1, `needs_images` whether it is the goal too,
    `needs_labels` whether a dataset must have labels.
    """

    measures: ClassVar[tuple[Measure, ...]]
    standardise: ClassVar[bool]
    needs_images: ClassVar[bool]
    needs_labels: ClassVar[bool]

    @abstractmethod
    def takes(self, output: Any, images: torch.Tensor, classes: int) -> bool:
        """Whether a network's output for these images can be scored."""

    @abstractmethod
    def rule(self, images: torch.Tensor, classes: int) -> str:
        """What a network must return for these images, in words."""

    @abstractmethod
    def loss(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of the batch, in float32."""

    @abstractmethod
    def measure_sums(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """The batch's contribution to each measure; sums over samples, without gradient."""


def is_real(output: Any) -> bool:
    """Whether it is a tensor of real numbers."""
    return isinstance(output, torch.Tensor) and output.is_floating_point()
