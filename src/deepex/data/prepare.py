"""From raw samples to a network's input, on the device: crop and flip, scale to 0…1, standardise, channels-last.

prepare = Prepare(manifest, device, standardise=True, channels_last=True, augment=AugmentConfig(flip=True))
prepare(raw, train=True)        # uint8 (n, H, W, C) on any device → float32 (n, C, H, W)
"""

import torch

from deepex.data.augment import Augment, AugmentConfig
from deepex.data.manifest import Manifest


class Prepare:
    """One affine map per channel: `standardise` to the training part's mean 0 and deviation 1, or else the range 0…1."""

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        *,
        standardise: bool,
        channels_last: bool,
        augment: AugmentConfig | None = None,
    ) -> None:
        low, high = manifest.scale
        mean = torch.tensor(manifest.mean if standardise else [0.0] * manifest.shape[0], dtype=torch.float64)
        deviation = torch.tensor(manifest.deviation if standardise else [1.0] * manifest.shape[0], dtype=torch.float64)
        deviation = torch.where(deviation > 0, deviation, 1.0)  # a constant channel carries nothing; it stays finite
        factor = 1.0 / ((high - low) * deviation)
        offset = -low * factor - mean / deviation
        self.factor = factor.to(device, torch.float32).view(1, -1, 1, 1)
        self.offset = offset.to(device, torch.float32).view(1, -1, 1, 1)
        self.raw_shape = (manifest.shape[1], manifest.shape[2], manifest.shape[0])
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self.augment = Augment(augment or AugmentConfig(), (manifest.shape[1], manifest.shape[2]))

    def __call__(self, raw: torch.Tensor, *, train: bool = False) -> torch.Tensor:
        """Prepare a batch; `raw` is left as it is. Only training draws random crops and flips."""
        raw = self.augment(raw) if train else self.augment.middle(raw)
        count, height, width, channels = raw.shape
        images = torch.empty((count, channels, height, width), device=raw.device, memory_format=self._format)
        # Not `.to(memory_format=…)`: with one channel it would keep strides that convolutions read as channels-last.
        images.copy_(raw.permute(0, 3, 1, 2))
        return images.mul_(self.factor).add_(self.offset)
