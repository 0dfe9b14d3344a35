"""Resize and centre crop, the same for every image, made in one step.

>>> geometry = Geometry(resize=256, crop=(224, 224))
>>> geometry.size(375, 500)
(224, 224)
>>> geometry.apply(np.zeros((375, 500, 3), np.uint8)).shape
(224, 224, 3)

`resize` of one number is the length of the shorter side, the longer one in proportion (rounded down); of two, height and width.
`crop` is the centre of the resized image (an odd border is smaller above and on the left).

The filter is bilinear with antialiasing: a triangle as wide as the source pixels that fall on an output pixel, the same as Pillow's
BILINEAR. Bytes are rounded between the passes over rows and columns and after them, here and by Pillow: they are off the exact
value by little more than 1 at most, and differ from Pillow's by 1, rarely 2, where a sum is near a half. Only what the crop needs
is computed.
"""

import math
import re
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

_SIZE = re.compile(r"([1-9]\d{0,8})(?:[xX×]([1-9]\d{0,8}))?")
_MOST_PIXELS = 1 << 16  # of one side
_MOST_HELD_BYTES = 64 << 20
_held = threading.local()
_Number = TypeVar("_Number", bound=np.generic)


class _Side(NamedTuple):
    """Height or width: `of` pixels become `to`, of which `kept` remain from `start` on."""

    of: float
    to: int
    start: int
    kept: int

    @property
    def stop(self) -> int:
        return self.start + self.kept

    def needed(self, length: int) -> int:
        """How many of `length` source pixels, from the first on, have a part in the pixels that are kept."""
        reach = min(length, math.ceil(self.stop * self.of / self.to + max(1.0, self.of / self.to)) + 1)
        # torch takes an output as long as its input for a copy, whatever the factor.
        return length if math.floor(reach * self.to / self.of) == reach else reach


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is done to each image before it is stored; nothing, if both are None."""

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        sides = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        for what, found in (("resize", sides), ("crop", self.crop or ())):
            if any(not isinstance(side, int) or isinstance(side, bool) or not 0 < side <= _MOST_PIXELS for side in found):
                raise DataError(f"{what} is {found}; each side must be a number of pixels from 1 to {_MOST_PIXELS}: correct it")
        if isinstance(self.resize, tuple) and len(self.resize) != 2:
            raise DataError(f"resize is {self.resize}; it must be the shorter side, or height and width: give one or two numbers")
        if self.crop is not None and len(self.crop) != 2:
            raise DataError(f"crop is {self.crop}; it must be height and width: give two numbers")
        if self.crop is not None and self.resize is not None:
            least = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
            # With the shorter side alone known, a crop may be longer than it on one side, never on both.
            too_large = [kept > side for kept, side in zip(self.crop, least, strict=True)]
            if all(too_large) or (any(too_large) and isinstance(self.resize, tuple)):
                raise DataError(f"crop {text(self.crop)} is larger than resize {text(self.resize)}: crop less or resize to more")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size between resize and crop of an image of this size."""
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        shorter = min(height, width)
        return self.resize * height // shorter, self.resize * width // shorter

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image of this size ends with; DataError if the crop is larger than the image."""
        resized = self.resized(height, width)
        if self.crop is None:
            return resized
        if self.crop[0] > resized[0] or self.crop[1] > resized[1]:
            after = "" if self.resize is None else f", {text(resized)} after the resize"
            raise DataError(
                f"crop {text(self.crop)} is larger than the image ({text((height, width))}{after}; height × width): "
                "crop less or resize to more"
            )
        return self.crop

    def apply(self, image: NDArray[_Number], *, original: tuple[int, int] | None = None, scale: float = 1.0) -> NDArray[_Number]:
        """Resize and crop an image (height, width, channels) of uint8 or float32.

        `original` is the size that the result is worked out from where `image` was decoded at a smaller `scale` already. It may
        have one row and column more than the scale makes of the original, as libjpeg rounds up.
        """
        height, width = original or image.shape[:2]
        resized, kept = self.resized(height, width), self.size(height, width)
        rows, columns = (
            _Side(of * scale, to, (to - side) // 2, side) for of, to, side in zip((height, width), resized, kept, strict=True)
        )
        if rows.to == rows.of and columns.to == columns.of:
            return image[rows.start : rows.stop, columns.start : columns.stop]
        return _resample_bytes(image, rows, columns) if image.dtype == np.uint8 else _resample_floats(image, rows, columns)


def text(size: int | tuple[int, ...]) -> str:
    """A size as it is given on the command line: 256, or 224x192."""
    return str(size) if isinstance(size, int) else "x".join(map(str, size))


def parse_size(value: str) -> int | tuple[int, int]:
    """Read "256" (one length) or "224x192" (height and width)."""
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise DataError(f"size {value!r} is neither a number of pixels nor HEIGHTxWIDTH; give for example 256 or 224x192")
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


def scratch(purpose: str, size: int) -> NDArray[np.uint8]:
    """Memory of this thread for at least `size` bytes, the same at every call: fresh memory would cost a fifth of a JPEG's time."""
    held: NDArray[np.uint8] | None = getattr(_held, purpose, None)
    if held is None or len(held) < size:
        held = np.empty(size, np.uint8)
        if size <= _MOST_HELD_BYTES:
            setattr(_held, purpose, held)
    return held


def _resample_bytes(image: NDArray[Any], rows: _Side, columns: _Side) -> NDArray[Any]:
    """By torch, whose kernel for 8-bit colour takes a third of Pillow's time and runs on the calling thread alone."""
    import torch

    if columns.to == 1 < rows.to:  # lying down: on aarch64 torch 2.13 repeats the first row of a grey image one pixel wide
        return _resample_bytes(image.swapaxes(0, 1), columns, rows).swapaxes(0, 1)
    # A copy, because torch warns of arrays that cannot be written. Its results are laid out as the pixels that it was given.
    part = image[: rows.needed(image.shape[0]), : columns.needed(image.shape[1])]
    needed = scratch("resized", part.size)[: part.size].reshape(part.shape)
    needed[:] = part
    pixels = torch.from_numpy(needed).unsqueeze(0).permute(0, 3, 1, 2)
    # The size made is the product rounded down; 255.99… must not become 255.
    factors = [side.to / side.of * (1 + 1e-12) for side in (rows, columns)]
    made = torch.nn.functional.interpolate(pixels, scale_factor=factors, mode="bilinear", antialias=True).permute(0, 2, 3, 1)[0]
    return made[rows.start : rows.stop, columns.start : columns.stop].numpy()


def _resample_floats(image: NDArray[Any], rows: _Side, columns: _Side) -> NDArray[Any]:
    from PIL import Image

    (top, bottom), (left, right) = ((side.start * side.of / side.to, side.stop * side.of / side.to) for side in (rows, columns))
    planes = [Image.fromarray(np.ascontiguousarray(image[..., channel], np.float32)) for channel in range(image.shape[2])]
    size, box = (columns.kept, rows.kept), (left, top, right, bottom)
    return np.stack([np.asarray(plane.resize(size, Image.Resampling.BILINEAR, box=box)) for plane in planes], axis=-1)
