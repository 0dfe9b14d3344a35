"""Resize, crop and replicate the samples of any source."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.geometry import Geometry
from deepex.data.source.base import Bad, Images
from deepex.errors import DataError


def reshaped(images: Images, geometry: Geometry, channels: int | None) -> Images:
    """`images` in another size or number of channels; themselves if they are so already, or were decoded so."""
    height, width, present = images.shape
    decoded = bool(getattr(images, "decoded", False))
    if decoded or (geometry.size(height, width) == (height, width) and channels in (None, present)):
        return images
    return Reshaped(images, geometry, channels or present)


@final
class Reshaped(Images):
    """`images`, resized and cropped; one channel is replicated to three."""

    def __init__(self, images: Images, geometry: Geometry, channels: int) -> None:
        height, width, present = images.shape
        if present not in {channels, 1}:
            raise DataError(f"{images.name(0)} has {present} channels; they cannot become {channels}: leave --channels out")
        self._images, self._geometry = images, geometry
        self._resizes = geometry.resize is not None
        self.shape = (*geometry.size(height, width), channels)
        self.dtype = images.dtype if images.dtype == np.uint8 or not self._resizes else np.dtype(np.float32)
        self.count, self.labels, self.block, self.portable = images.count, images.labels, images.block, images.portable
        self.busy = images.busy or self._resizes
        self.description = images.description | {"from": list(images.shape)}

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        raw = np.empty((len(numbers), *self._images.shape), self._images.dtype)
        bad = self._images.read(numbers, raw)
        lost = {one.place for one in bad}
        for place, sample in enumerate(raw):
            if place not in lost:
                known = sample if sample.dtype == np.uint8 else sample.astype(self.dtype)
                out[place] = self._geometry.apply(known)  # one channel spreads over three
        return bad

    @override
    def name(self, number: int) -> str:
        return self._images.name(number)
