"""Arrays of images in any order of dimensions, and their labels, brought to one form.

view, note = to_nhwc(array, path, None)        # (n, height, width, channels), and the sentence that says why
"""

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

AxisOrder = Literal["NHW", "NHWC", "NCHW"]

_CHANNELS: Final = (1, 3, 4)
_HIGHEST: Final = int(np.iinfo(np.int64).max)  # of a label


def to_nhwc(images: NDArray[Any], path: Path, layout: AxisOrder | None) -> tuple[NDArray[Any], str]:
    """View `images` as (n, height, width, channels), and say what was decided."""
    shape = images.shape
    if layout is None:
        layout, reason = guess_layout(shape, path)
    else:
        reason = "as told by --layout"
    if len(shape) != len(layout):
        raise DataError(f"{path} has an array of shape {shape}; layout {layout} needs {len(layout)} dimensions: choose another")
    note = f"{layout} {list(shape)}, {reason}"
    if layout == "NHW":
        return images[..., np.newaxis], note
    return (images.transpose(0, 2, 3, 1) if layout == "NCHW" else images), note


def guess_layout(shape: tuple[int, ...], path: Path) -> tuple[AxisOrder, str]:
    """Which dimension is which, from their number and sizes, and why."""
    if len(shape) == 3:
        return "NHW", "because it has 3 dimensions"
    if len(shape) != 4:
        raise DataError(
            f"{path} has an array of shape {shape}; images must be (n, height, width), (n, height, width, channels) or "
            "(n, channels, height, width): reshape it and save it again"
        )
    if shape[3] in _CHANNELS:
        return "NHWC", f"because the last dimension, {shape[3]}, looks like channels"
    if shape[1] in _CHANNELS:
        return "NCHW", f"because the second dimension, {shape[1]}, looks like channels"
    raise DataError(
        f"{path} has an array of shape {shape}, where neither end looks like channels (1, 3 or 4); say which it is "
        "with --layout NHWC or --layout NCHW"
    )


def checked_labels(labels: NDArray[Any], path: Path) -> NDArray[np.int64]:
    """Labels as class numbers (n,), or an error that names what is wrong with them."""
    if labels.ndim == 2 and labels.shape[1] == 1:  # Keras keeps the labels of CIFAR as a column
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{path} has labels of shape {labels.shape}; they must be (n,), one class number per image: convert them")
    if labels.dtype.kind not in "bui":
        raise DataError(f"{path} has labels of type {labels.dtype}; they must be integers, class numbers from 0: convert them")
    wrong = (labels < 0) | (labels > _HIGHEST)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(f"{path} has the label {labels[first]} at sample {first}; labels are class numbers from 0: renumber them")
    return labels.astype(np.int64)


def listed(names: list[str], most: int = 8) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
