"""What the network learns: the loss that is minimised, and the measure that a person reads.

objective = make_objective("classify")
loss = objective.loss(output, images, labels)        # mean over the batch
wrong = objective.tally(output, images, labels)      # a sum over the batch, on the device
objective.measure, objective.value(wrong, samples)   # "error", wrong / seen
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Final, final

import torch
from torch.nn import functional
from typing_extensions import override

from deepex.errors import UnknownName


class Objective(ABC):
    """A loss and a measure.

    `standardise` says whether the network's input is standardised or in 0…1, `needs_images` whether it is the goal too.
    """

    measure: str
    standardise: bool
    needs_images: bool

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
    def tally(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The batch's contribution to the measure; a sum over samples, without gradient."""

    @abstractmethod
    def value(self, tally: float, samples: int) -> float:
        """The measure, from the sum of tallies over `samples`."""


@final
class Classify(Objective):
    """Cross entropy; the measure is the error rate, wrong / seen."""

    measure = "error"
    standardise = True
    needs_images = False

    @override
    def takes(self, output: Any, images: torch.Tensor, classes: int) -> bool:
        return _is_real(output) and output.dim() == 2 and len(output) == len(images) and output.shape[1] >= classes

    @override
    def rule(self, images: torch.Tensor, classes: int) -> str:
        return f"a tensor of real numbers of shape {(len(images), classes)}, a score of each class for each image"

    @override
    def loss(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = functional.cross_entropy(output.float(), labels)
        return loss

    @override
    def tally(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wrong: torch.Tensor = output.detach().argmax(dim=1) != labels
        return wrong.sum()

    @override
    def value(self, tally: float, samples: int) -> float:
        return tally / samples


@final
class Reconstruct(Objective):
    """A variational autoencoder's loss: reconstruction plus Kullback-Leibler divergence, summed over pixels and latent variables.

    The network gives (logits, mean, log variance) of Kingma & Welling 2014, or logits alone. The reconstruction term is the binary
    cross entropy, as befits contact maps; the measure is the root mean square error per pixel, as in the paper.
    """

    measure = "rmse"
    standardise = False
    needs_images = True

    @override
    def takes(self, output: Any, images: torch.Tensor, classes: int) -> bool:
        logits, *latent = output if isinstance(output, tuple) and output else (output,)
        if not all(map(_is_real, (logits, *latent))) or logits.shape != images.shape:
            return False
        return not latent or (len(latent) == 2 and latent[0].shape == latent[1].shape and latent[0].shape[:1] == images.shape[:1])

    @override
    def rule(self, images: torch.Tensor, classes: int) -> str:
        return (
            f"logits, a tensor of real numbers of shape {tuple(images.shape)}, or a tuple of these logits, the mean and the log "
            f"variance of its latent variables; both have one shape, ({len(images)}, …)"
        )

    @override
    def loss(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, *latent = output if isinstance(output, tuple) else (output,)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), images, reduction="sum")
        if latent:
            loss = loss + divergence(*latent)
        return loss / len(images)

    @override
    def tally(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = output[0] if isinstance(output, tuple) else output
        squares: torch.Tensor = (logits.detach().float().sigmoid() - images).square()
        return squares.flatten(1).mean(1).sum()

    @override
    def value(self, tally: float, samples: int) -> float:
        return math.sqrt(tally / samples)


def _is_real(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.is_floating_point()


def divergence(mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of normal distributions from the standard one, summed."""
    mean, log_variance = mean.float(), log_variance.float()
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()


OBJECTIVES: Final = {"classify": Classify, "reconstruct": Reconstruct}


def make_objective(name: str) -> Objective:
    """Look up an objective by its name in `--set objective=…`."""
    if name not in OBJECTIVES:
        raise UnknownName("objective", name, OBJECTIVES)
    return OBJECTIVES[name]()
