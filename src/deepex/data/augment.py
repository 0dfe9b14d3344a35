"""Random crops and flips, on the device, drawn anew for each image of each step.

    augment = Augment(AugmentConfig(crop=224, flip=True), (256, 256))
    augment.size                        # (224, 224): what the network sees
    augment(raw)                        # uint8 (n, 256, 256, 3) → (n, 224, 224, 3), from torch's random numbers on raw's device
    augment.middle(raw)                 # the middle, for validation

Crop and flip together are one gather of bytes; nothing is read from the device.
"""

from dataclasses import dataclass
from typing import final

import torch

from deepex.errors import ConfigError
from deepex.record.table import check_types


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How the images of the train part are varied; those for validation are cropped in the middle.

    `crop`: a square of so many pixels, anywhere in the image, 0 for its whole size. `pad`: rows and columns of zeros around the
    image first, so that a crop may reach over its edge. `flip`: mirror half of the images left to right.
    """

    crop: int = 0
    pad: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        check_types(self, "augment.")
        for key, value in (("crop", self.crop), ("pad", self.pad)):
            if value < 0:
                raise ConfigError(f"augment.{key} is {value}; it must be 0 or more pixels")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """What becomes of an image's size."""
        if self.crop > min(height, width):
            raise ConfigError(
                f"augment.crop is {self.crop}, but the images are {height}×{width}: crop at most {min(height, width)}"
            )
        if self.pad >= min(height, width):
            raise ConfigError(
                f"augment.pad is {self.pad}, but the images are {height}×{width}, of which a crop might see nothing: pad by less "
                f"than {min(height, width)}"
            )
        return (self.crop, self.crop) if self.crop else (height, width)


@final
class Augment:
    """Crops and flips images of one size."""

    def __init__(self, config: AugmentConfig, size: tuple[int, int]) -> None:
        self.config, self._from, self.size = config, size, config.size(*size)
        self._moves = config.pad > 0 or self.size != size
        self.active = self._moves or config.flip

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """A fresh crop, perhaps mirrored, of every image (n, height, width, channels)."""
        if not self.active:
            return raw
        count, device, pad = len(raw), raw.device, self.config.pad
        rows, columns = (self._places(count, axis, device) for axis in (0, 1))
        if self.config.flip:
            mirrored = torch.randint(2, (count, 1), device=device, dtype=torch.bool)
            columns = torch.where(mirrored, columns.flip(1), columns)
        inside = None
        if pad:
            height, width = self._from
            inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
            rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        images = torch.arange(count, device=device)[:, None, None]
        taken = raw[images, rows[:, :, None], columns[:, None, :]]
        return taken if inside is None else taken * inside[..., None]

    def middle(self, raw: torch.Tensor) -> torch.Tensor:
        """The middle of every image, in the size of a crop; a view."""
        top, left = ((whole - part) // 2 for whole, part in zip(self._from, self.size, strict=True))
        return raw[:, top : top + self.size[0], left : left + self.size[1]]

    def _places(self, count: int, axis: int, device: torch.device) -> torch.Tensor:
        """The rows or columns that each image keeps (count, kept)."""
        pad, kept = self.config.pad, self.size[axis]
        places = torch.arange(kept, device=device).expand(count, kept)
        if not self._moves:
            return places
        return places + torch.randint(-pad, self._from[axis] - kept + pad + 1, (count, 1), device=device)
