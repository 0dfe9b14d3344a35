"""`classify`: which class a sample is of."""

from typing import Any, final

import torch
from torch.nn import functional
from typing_extensions import override

from deepex.record.measure import Measure
from deepex.task.task import Task, is_real


@final
class Classify(Task):
    """Cross entropy; the measure is the error rate, wrong / seen."""

    measures = (Measure(name="error", unit="%"),)
    standardise = True
    needs_images = False
    needs_labels = True

    @override
    def takes(self, output: Any, images: torch.Tensor, classes: int) -> bool:
        return is_real(output) and output.dim() == 2 and len(output) == len(images) and output.shape[1] >= classes

    @override
    def rule(self, images: torch.Tensor, classes: int) -> str:
        return f"a tensor of real numbers of shape {(len(images), classes)}, a score of each class for each image"

    @override
    def loss(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = functional.cross_entropy(output.float(), labels)
        return loss

    @override
    def measure_sums(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        wrong: torch.Tensor = output.detach().argmax(dim=1) != labels
        return [wrong.sum()]
