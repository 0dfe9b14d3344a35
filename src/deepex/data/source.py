"""What can be packed: IDX files, `.npy` and `.npz`, brought to one form.

Whatever the file, the images come out as an array (n, height, width, channels), a view into the mapped file where the
format allows it, and the labels as integers (n,).

>>> source = read_source(Path("fashion-mnist"))
>>> source.train.images.shape, source.train.labels.shape
((60000, 28, 28, 1), (60000,))
"""

import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepex.data.idx import read_idx
from deepex.data.npy import map_npy
from deepex.errors import DataError

Layout = Literal["NHW", "NHWC", "NCHW"]

_MNIST_NAME = re.compile(r"(?P<part>train|t10k)-(?P<what>images|labels)[-.]idx[13]-ubyte(\.gz)?")
# Train images, train labels, validation images, validation labels: as in the files of Keras, and as people name theirs.
_NPZ_NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("images", "labels", "", ""),
    ("x", "y", "", ""),
)
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Images (n, height, width, channels) of any number type, their labels, and where they came from."""

    images: NDArray[Any]
    labels: NDArray[np.int64] | None
    path: Path
    files: tuple[str, ...]
    layout: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Train samples, and validation samples where the source has its own."""

    train: Samples
    validation: Samples | None = None


def read_source(path: Path, *, labels: Path | None = None, layout: Layout | None = None) -> Source:
    """Find out what `path` is and read it; `labels` is a file of its own for one file of images."""
    if not path.exists():
        raise DataError(f"there is no {path}; give a directory of IDX files, or an IDX, .npy or .npz file")
    is_archive = path.is_file() and _begins_with(path, b"PK")
    if labels is not None and (path.is_dir() or is_archive):
        raise DataError(f"--labels {labels} was given, but {path} brings its own labels; leave --labels out")
    if path.is_dir():
        return _read_mnist(path, layout)
    if is_archive:
        return _read_npz(path, layout)
    pair = (path, labels)
    images = _read_array(path)
    return Source(train=_samples(images, None if labels is None else _read_array(labels), path, pair, layout))


def _read_mnist(directory: Path, layout: Layout | None) -> Source:
    """Read a directory with the four files of MNIST, or its first two."""
    names = sorted(entry.name for entry in directory.iterdir())
    if "manifest.json" in names:
        raise DataError(f"{directory} is a packed dataset already; use it as it is, or pack what it was made from")
    found = {(m["part"], m["what"]): directory / m[0] for m in map(_MNIST_NAME.fullmatch, names) if m}
    if ("train", "images") not in found:
        raise DataError(
            f"{directory} has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz; it has {_listed(names)}: give "
            "a directory with IDX files named like those of MNIST, or name one IDX, .npy or .npz file"
        )
    samples = {}
    for part in ("train", "t10k"):
        if (part, "images") in found:
            pair = (found[part, "images"], found.get((part, "labels")))
            arrays = [None if path is None else read_idx(path) for path in pair]
            samples[part] = _samples(arrays[0], arrays[1], pair[0], pair, layout)
    return Source(train=samples["train"], validation=samples.get("t10k"))


def _read_npz(path: Path, layout: Layout | None) -> Source:
    try:
        # Opened here because numpy forgets to close a damaged archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for names in _NPZ_NAMES:
                if names[0] in archive.files:
                    arrays = [archive[name] if name in archive.files else None for name in names]
                    break
            else:
                raise DataError(
                    f"{path} has the arrays {_listed(archive.files)}; it must have x_train (with y_train, x_test, "
                    "y_test), images (with labels) or x (with y): save it again with numpy.savez under these names"
                )
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole array file (.npz): {error}; restore it or save it with numpy.savez") from error
    pair = (path, None)
    train = _samples(arrays[0], arrays[1], path, pair, layout)
    if arrays[2] is None:
        return Source(train=train)
    return Source(train=train, validation=_samples(arrays[2], arrays[3], path, pair, layout))


def _read_array(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise DataError(f"there is no file {path}; correct the name")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); it must be an IDX or .npy file with at least one value: fetch it again")
    if path.suffix in (".npy", ".npz") or _begins_with(path, b"\x93NUMPY"):
        return map_npy(path)
    return read_idx(path)


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def _samples(
    images: NDArray[Any] | None,
    labels: NDArray[Any] | None,
    path: Path,
    files: tuple[Path, Path | None],
    layout: Layout | None,
) -> Samples:
    """Check images and labels against each other and bring them to the common form."""
    if images is None or images.size == 0:
        shape = None if images is None else images.shape
        raise DataError(f"{path} has no images (shape {shape}); give a source with at least one")
    if images.dtype.kind not in "buif":
        raise DataError(f"{path} has values of type {images.dtype}; images must be integers or real numbers: convert them")
    view, note = _to_nhwc(images, path, layout)
    names = tuple(file.name for file in files if file is not None)
    where = files[1] or path
    checked = None if labels is None else _checked_labels(labels, where)
    if checked is not None and len(checked) != len(view):
        raise DataError(
            f"{path} has {len(view)} images, but {where} has {len(checked)} labels; there must be one label per image: "
            "give the files that belong together"
        )
    return Samples(images=view, labels=checked, path=path, files=names, layout=note)


def _to_nhwc(images: NDArray[Any], path: Path, layout: Layout | None) -> tuple[NDArray[Any], str]:
    """View `images` as (n, height, width, channels), and say what was decided."""
    shape = images.shape
    if layout is None:
        layout, reason = _guess_layout(shape, path)
    else:
        reason = "as told by --layout"
    if len(shape) != len(layout):
        raise DataError(f"{path} has an array of shape {shape}; layout {layout} needs {len(layout)} dimensions: choose another")
    note = f"{layout} {list(shape)}, {reason}"
    if layout == "NHW":
        return images[..., np.newaxis], note
    return (images.transpose(0, 2, 3, 1) if layout == "NCHW" else images), note


def _guess_layout(shape: tuple[int, ...], path: Path) -> tuple[Layout, str]:
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


def _checked_labels(labels: NDArray[Any], path: Path) -> NDArray[np.int64]:
    if labels.ndim == 2 and labels.shape[1] == 1:  # Keras keeps the labels of CIFAR as a column
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{path} has labels of shape {labels.shape}; they must be (n,), one class number per image: convert them")
    if labels.dtype.kind not in "bui":
        raise DataError(f"{path} has labels of type {labels.dtype}; they must be integers, class numbers from 0: convert them")
    if labels.size and int(labels.min()) < 0:
        first = int(np.argmax(labels < 0))
        raise DataError(f"{path} has the label {labels[first]} at sample {first}; labels are class numbers from 0: renumber them")
    return labels.astype(np.int64)


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
