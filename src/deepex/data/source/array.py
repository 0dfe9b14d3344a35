"""Arrays as samples: `.npy`, `.npz` and IDX files, brought to one form.

Whatever the file, the images come out as (height, width, channels), from a view into the mapped file where the format allows it,
and the labels as integers.

>>> source = open_arrays(Path("fashion-mnist"))
>>> source.train.count, source.train.shape
(60000, (28, 28, 1))
"""

import math
import os
import re
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from deepex.data.npy import map_npy, parse_header
from deepex.data.source import stream
from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.idx import read_idx, stream_header
from deepex.data.source.layout import AxisOrder, checked_labels, listed, to_nhwc
from deepex.data.source.names import ArrayNames, usual, with_labels
from deepex.errors import DataError

MNIST_NAME = re.compile(r"(?P<part>train|t10k)-(?P<what>images|labels)[-.]idx[13]-ubyte(\.gz)?")


@final
class ArrayImages(Images):
    """The rows of an array (n, height, width, channels) that lies in memory or in a mapped file."""

    portable = False

    def __init__(self, array: NDArray[Any], labels: NDArray[np.int64] | None, *, path: Path, files: list[str], layout: str) -> None:
        self._array, self._path = array, path
        self.count, self.shape, self.dtype = len(array), array.shape[1:], array.dtype
        self.labels = labels
        self.description = {"files": files, "layout": layout}

    @override
    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        out[:] = self._array[numbers]
        return []

    @override
    def name(self, number: int) -> str:
        return f"{self._path} sample {number}"


def open_mnist(directory: Path, layout: AxisOrder | None) -> Source:
    """Open a directory with the four files of MNIST, or its first two."""
    found: dict[tuple[str, str], Path] = {}
    for match in map(MNIST_NAME.fullmatch, sorted(os.listdir(directory))):
        if match is not None and found.setdefault((match["part"], match["what"]), directory / match[0]).name != match[0]:
            other = found[match["part"], match["what"]].name
            raise DataError(f"{directory} has both {other} and {match[0]}; keep one of them")
    samples = {}
    for part in ("train", "t10k"):
        if (part, "images") in found:
            pair = (found[part, "images"], found.get((part, "labels")))
            samples[part] = _streamed_idx(pair, layout) or _images(_read_idx(pair[0]), _read_idx(pair[1]), pair[0], pair, layout)
    return Source(train=samples["train"], validation=samples.get("t10k"))


def open_npz(
    path: Path, layout: AxisOrder | None, *, images: str | None = None, labels: str | None = None, held_labels: str | None = None
) -> Source:
    """Open an archive of arrays, under the usual names or those given; labels may also be in a file of their own."""
    try:
        # Opened here because numpy forgets to close a damaged archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            has = archive.files.__contains__
            names = usual(has) if images is None else ArrayNames(images) if has(images) else None
            if names is None:
                raise DataError(_no_such_array(path, archive.files, images))
            names = with_labels(names, path, labels, held_labels)
            train = _npz_part(path, archive, names.images, names.labels, layout)
            held = None if names.held_images is None else _npz_part(path, archive, names.held_images, names.held_labels, layout)
            return Source(train=train, validation=held)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole array file (.npz): {error}; restore it or save it with numpy.savez") from error


def _npz_part(path: Path, archive: Any, images: str, labels: str | None, layout: AxisOrder | None) -> Images:
    file = None
    if labels is None or labels in archive.files:
        classes = None if labels is None else archive[labels]
    elif Path(labels).is_file():
        file = Path(labels)
        classes = _read_array(file)
    else:
        raise DataError(
            f"{path} has no array {labels!r}, and there is no such file either; it has {listed(archive.files)}: name one of these, "
            "or a file, with --labels"
        )
    if archive.zip.getinfo(f"{images}.npy").file_size > stream.MOST_BYTES:
        return _streamed_member(path, archive.zip, images, (classes, file), layout)
    return _images(archive[images], classes, path, (path, file), layout)


def open_array(path: Path, labels: Path | None, layout: AxisOrder | None) -> Source:
    """Open one IDX or `.npy` file of images, and that of its labels."""
    streamed = _streamed_idx((path, labels), layout)
    if streamed is not None:
        return Source(train=streamed)
    images = _read_array(path)
    return Source(train=_images(images, None if labels is None else _read_array(labels), path, (path, labels), layout))


def _streamed_idx(pair: tuple[Path, Path | None], layout: AxisOrder | None) -> Images | None:
    """A gzipped IDX file that is too large for memory."""
    path, labels = pair
    header = stream_header(path) if path.is_file() else None
    if header is None or math.prod(header[1]) * header[0].itemsize <= stream.MOST_BYTES:
        return None
    dtype, shape, offset = header
    return stream.StreamedImages(
        partial(stream.open_gzip, path),
        offset=offset,
        shape=shape,
        dtype=dtype,
        labels=_labels_for(shape[0], None if labels is None else _read_array(labels), path, labels or path),
        path=path,
        files=[file.name for file in pair if file is not None],
        layout=layout,
    )


def _streamed_member(
    path: Path, archive: zipfile.ZipFile, images: str, labels: tuple[NDArray[Any] | None, Path | None], layout: AxisOrder | None
) -> Images:
    """An array of an archive that is too large for memory."""
    with archive.open(f"{images}.npy") as member:
        header = parse_header(member)
    if header.fortran_order:
        raise DataError(f"{path} has {images} in Fortran order, too large to turn in memory: save it in C order")
    classes, file = labels
    return stream.StreamedImages(
        partial(stream.open_member, path, f"{images}.npy"),
        offset=header.offset,
        shape=header.shape,
        dtype=header.dtype,
        labels=_labels_for(header.shape[0], classes, path, file or path),
        path=path,
        files=[each.name for each in (path, file) if each is not None],
        layout=layout,
    )


def _no_such_array(path: Path, present: list[str], asked: str | None) -> str:
    if asked is not None:
        return f"{path} has no array {asked!r}; it has {listed(present)}: name one of these with --images"
    return (
        f"{path} has the arrays {listed(present)}; it must have x_train (with y_train, x_test, y_test), images (with labels), or "
        "another pair of names in use: name it with --images, or save it again with numpy.savez under these names"
    )


def _read_array(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise DataError(f"there is no file {path}; correct the name")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); it must be an IDX or .npy file with at least one value: fetch it again")
    if path.suffix in (".npy", ".npz") or begins_with(path, b"\x93NUMPY"):
        return map_npy(path)
    return read_idx(path)


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether the first bytes of a file are `magic`."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def _labels_for(count: int, labels: NDArray[Any] | None, path: Path, where: Path) -> NDArray[np.int64] | None:
    """Labels that belong to `count` images."""
    checked = None if labels is None else checked_labels(labels, where)
    if checked is not None and len(checked) != count:
        raise DataError(
            f"{path} has {count} images, but {where} has {len(checked)} labels; there must be one label per image: "
            "give the files that belong together"
        )
    return checked


def _read_idx(path: Path | None) -> NDArray[Any] | None:
    return None if path is None else read_idx(path)


def _images(
    images: NDArray[Any] | None,
    labels: NDArray[Any] | None,
    path: Path,
    files: tuple[Path, Path | None],
    layout: AxisOrder | None,
) -> ArrayImages:
    """Check images and labels against each other and bring them to the common form."""
    if images is None or images.size == 0:
        shape = None if images is None else images.shape
        raise DataError(f"{path} has no images (shape {shape}); give a source with at least one")
    if images.dtype.kind not in "buif":
        raise DataError(f"{path} has values of type {images.dtype}; images must be integers or real numbers: convert them")
    view, note = to_nhwc(images, path, layout)
    where = files[1] or path
    checked = _labels_for(len(view), labels, path, where)
    return ArrayImages(view, checked, path=path, files=[file.name for file in files if file is not None], layout=note)
