"""`reconstruct`: an autoencoder, plain or variational."""

from typing import Any, final

import torch
from torch.nn import functional
from typing_extensions import override

from deepex.record.measure import Measure
from deepex.task.task import Task, is_real


@final
class Reconstruct(Task):
    """A variational autoencoder's loss: reconstruction plus Kullback-Leibler divergence, summed over pixels and latent variables.

    The network gives (logits, mean, log variance) of Kingma & Welling 2014, or logits alone. The reconstruction term is the binary
    cross entropy, as befits contact maps; the measure is the root mean square error per pixel, as in the paper.
    """

    measures = (Measure(name="rmse", form="root", label="RMSE"),)
    standardise = False
    needs_images = True
    needs_labels = False

    @override
    def takes(self, output: Any, images: torch.Tensor, classes: int) -> bool:
        logits, *latent = output if isinstance(output, tuple) and output else (output,)
        if not all(map(is_real, (logits, *latent))) or logits.shape != images.shape:
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
    def measure_sums(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        logits = output[0] if isinstance(output, tuple) else output
        squares: torch.Tensor = (logits.detach().float().sigmoid() - images).square()
        return [squares.flatten(1).mean(1).sum()]


def divergence(mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of normal distributions from the standard one, summed."""
    mean, log_variance = mean.float(), log_variance.float()
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
