"""What is in a packed dataset, to look at: counts per class, the spread of the values, a sheet of samples.

overview = look(PackedDataset.open("packed/atomai"))
overview.counts["train"]["SrTiO3"], overview.histogram["shares"]
contact_sheet(dataset, Path("sheet.png"))
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepex.data.dataset import PackedDataset, PackedPart
from deepex.errors import DataError
from deepex.record.files import write_atomic

_SAMPLES: Final = 2048  # looked at for the histogram, spread over the train part
_BINS: Final = 16
_SHEET_PIXELS: Final = 1600
_GAP: Final = 2


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Counts of each class in each part (empty without labels), and the share of values in equal ranges of the scale."""

    counts: dict[str, dict[str, int]]
    histogram: dict[str, Any]


def look(dataset: PackedDataset) -> Overview:
    """Count the labels of all files; the values are those of some samples, spread over the train part."""
    for bad in dataset.missing():
        raise DataError(bad)
    manifest = dataset.manifest
    names = {name: dataset.part(name) for name in manifest.parts}
    counts = {name: _counts(part, manifest.classes) for name, part in names.items()} if manifest.classes else {}
    return Overview(counts=counts, histogram=_histogram(dataset))


def _counts(part: PackedPart, classes: tuple[str, ...]) -> dict[str, int]:
    found = np.zeros(len(classes), np.int64)
    for file in part.packed.files:
        found += np.bincount(part.open_labels(file), minlength=len(classes))
    return {f"{name}": int(count) for name, count in zip(classes, found, strict=True)}


def _histogram(dataset: PackedDataset) -> dict[str, Any]:
    images, _ = _spread(dataset.part("train"), _SAMPLES)
    low, high = dataset.manifest.scale
    inside = np.zeros(_BINS, np.int64)
    for image in images:  # in float64, as the range of all float32 is too wide for one
        inside += np.histogram(image.astype(np.float64), bins=_BINS, range=(low, high))[0]
    return {"low": low, "high": high, "samples": len(images), "shares": (inside / images.size).round(6).tolist()}


def _spread(part: PackedPart, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Samples at equal distances."""
    numbers = np.linspace(0, part.count - 1, min(count, part.count)).astype(np.int64)
    images = np.empty((len(numbers), *part.sample_shape), part.dtype)
    labels = np.empty(len(numbers), np.int64)
    part.gather(numbers, images, labels)
    return images, labels


def contact_sheet(dataset: PackedDataset, path: Path) -> tuple[int, int]:
    """Write a PNG with samples of the train part: a row for each class, or a square where there are none; give rows and columns."""
    from PIL import Image

    part, manifest = dataset.part("train"), dataset.manifest
    height, width, channels = part.sample_shape
    if channels not in {1, 3}:
        raise DataError(f"{dataset.directory} has images of {channels} channels; a contact sheet shows 1 or 3")
    columns = max(1, min(16, _SHEET_PIXELS // (width + _GAP)))
    rows = min(len(manifest.classes) or columns, max(1, 4 * _SHEET_PIXELS // (height + _GAP)))
    sheet = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), 64, np.uint8)
    for row, images in enumerate(_rows(part, rows, columns, labelled=bool(manifest.classes))):
        for column, image in enumerate(images):
            top, left = row * (height + _GAP), column * (width + _GAP)
            sheet[top : top + height, left : left + width] = _as_bytes(image, manifest.scale)
    picture = Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)
    write_atomic(path, lambda temporary: picture.save(temporary, format="PNG"))
    return rows, columns


def _rows(part: PackedPart, rows: int, columns: int, *, labelled: bool) -> list[NDArray[Any]]:
    images, labels = _spread(part, rows * columns * (8 if labelled else 1))
    if not labelled:
        return [images[row * columns : (row + 1) * columns] for row in range(rows)]
    return [images[labels == label][:columns] for label in range(rows)]


def _as_bytes(image: NDArray[Any], scale: tuple[float, ...]) -> NDArray[np.uint8]:
    low, high = scale
    return (np.clip((image.astype(np.float64) - low) / (high - low), 0, 1) * 255).round().astype(np.uint8)
