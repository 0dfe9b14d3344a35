"""What can be packed, from files as they are found: one function that looks, and a module for each kind.

source = open_source(Path("imagenet"), SourceConfig(resize=256, crop=(224, 224)))
source.train.count, source.train.shape, source.classes
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from deepex.data.geometry import Geometry
from deepex.data.source.array import MNIST_NAME, begins_with, open_array, open_mnist, open_npz
from deepex.data.source.base import Bad, Images, Source
from deepex.data.source.folder import TEXT_SUFFIXES, Listing, find_images, is_list, read_list
from deepex.data.source.layout import AxisOrder, listed
from deepex.data.source.walk import walk
from deepex.errors import DataError

__all__ = ["Bad", "Images", "Layout", "Source", "SourceConfig", "open_source"]

_HDF5_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_HDF5_SUFFIXES: Final = (".h5", ".hdf5", ".he5", ".nxs", ".hdf")
_IMAGE_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".jpe")
_TRAJECTORY_SUFFIXES: Final = (
    ".dcd",
    ".xtc",
    ".trr",
    ".nc",
    ".ncdf",
    ".netcdf",
    ".h5md",
    ".lammpstrj",
    ".lammpsdump",
    ".mdcrd",
    ".crdbox",
    ".xyz",
    ".pdb",
    ".gro",
    ".tng",
)
_NAMED: Final = ("images", "labels", "validation_labels", "layout")
_MOST_TEXTS_PER_PICTURE: Final = 10  # in one folder: with more of them, the pictures are plots of the matrices
_MOST_NAMES: Final = 1_000_000  # looked at for a picture; about a second
_KINDS: Final = (
    "a folder of PNG or JPEG files (one folder per class), a list file, HDF5, .npy, .npz, IDX (MNIST), CIFAR's binary version, "
    "matrices as text, or a trajectory with --topology"
)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How a source is read; what is None is found out or left as it is.

    `images`, `labels`: names within an HDF5 or .npz file, and `validation_labels` of validation images in the same file; `labels`
    is a file for one IDX or .npy file, and may be one for .npz. `layout`: the order of an
    array's dimensions. `resize`: the shorter side, or (height, width). `crop`: (height, width) from the middle. `channels`: 1 or 3;
    monochrome is replicated. `dtype`: how samples will be stored, which decides whether 16-bit pictures fit; bytes with
    a `scale` are made of any numbers. `convert`: accept CMYK, transparent, 16-bit and animated pictures; `max_pixels`: refuse
    larger ones before they are decoded. `topology`, `select`, `cutoff`, `stride`, `periodic`: of a trajectory. `matrix`: (rows,
    columns) of matrices that stand on one line each.
    """

    images: str | None = None
    labels: str | None = None
    validation_labels: str | None = None
    layout: AxisOrder | None = None
    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    channels: Literal[1, 3] | None = None
    dtype: Literal["uint8", "float16", "float32"] | None = None
    scale: tuple[float, float] | None = None
    convert: bool = False
    max_pixels: int | None = None
    topology: Path | None = None
    select: str = "name CA"
    cutoff: float = 8.0
    stride: int = 1
    periodic: bool = False
    matrix: tuple[int, int] | None = None

    @property
    def read_dtype(self) -> Literal["uint8", "float32"] | None:
        """The type in which pictures and texts are read for the one in which they will be stored; None is found out."""
        if self.dtype != "uint8":
            return None if self.dtype is None else "float32"
        return "uint8" if self.scale is None else None

    @property
    def names(self) -> dict[str, str | None]:
        """Where images and labels are within a file."""
        return {"images": self.images, "labels": self.labels, "held_labels": self.validation_labels}

    @property
    def geometry(self) -> Geometry:
        """Resize and crop."""
        return Geometry(resize=self.resize, crop=self.crop)


def open_source(path: Path, config: SourceConfig | None = None) -> Source:
    """Find out what `path` is and open it."""
    config = config or SourceConfig()
    if not path.exists():
        raise DataError(f"there is no {path}; give {_KINDS}")
    if config.topology is not None:
        return _reshaped(_open_trajectory(path, config), config)
    source = _open_directory(path, config) if path.is_dir() else _open_file(path, config)
    return _reshaped(source, config)


def _open_directory(path: Path, config: SourceConfig) -> Source:
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if "manifest.json" in names:
        raise DataError(f"{path} is a packed dataset already; use it as it is, or pack what it was made from")
    hdf5 = [path / name for name in names if name.lower().endswith(_HDF5_SUFFIXES)]
    if hdf5:
        return _open_hdf5(hdf5, config)
    if any(match and match["what"] == "images" and match["part"] == "train" for match in map(MNIST_NAME.fullmatch, names)):
        return replace(open_mnist(path, config.layout), options=("layout",))
    if any(name in names for name in ("data_batch_1.bin", "data_batch_1", "test_batch.bin", "train.bin")):
        from deepex.data.source.cifar import open_cifar

        return open_cifar(path)
    return _open_folder(path, names, config)


def _open_folder(path: Path, names: Sequence[str], config: SourceConfig) -> Source:
    """A folder of many small files: pictures, or matrices as text."""
    kind = _kind_of_files(path)
    if kind is None:
        raise DataError(f"{path} has nothing that can be packed; it has {listed(list(names))}: give {_KINDS}")
    return _open_images(*find_images(path), config) if kind == "pictures" else _open_matrices(path, config)


def _kind_of_files(path: Path) -> Literal["pictures", "texts"] | None:
    """What the files below a folder are. Texts describe the pictures, wherever there are any, unless these are a few among many."""
    has_texts, seen = False, 0
    for _, names in walk(path):
        lower = [name.lower() for name in names]
        pictures = sum(name.endswith(_IMAGE_SUFFIXES) for name in lower)
        texts = sum(name.removesuffix(".gz").endswith(TEXT_SUFFIXES) for name in lower)
        if pictures and texts <= _MOST_TEXTS_PER_PICTURE * pictures:
            return "pictures"
        has_texts |= texts > 0
        seen += 1 + len(names)
        if seen > _MOST_NAMES:
            break
    return "texts" if has_texts else None


def _open_images(train: Listing, validation: Listing | None, config: SourceConfig) -> Source:
    from deepex.data.source.image import ImageFiles

    options: dict[str, Any] = {
        "geometry": config.geometry,
        "channels": config.channels,
        "convert": config.convert,
        "dtype": None if config.read_dtype is None else np.dtype(config.read_dtype),
    } | ({} if config.max_pixels is None else {"max_pixels": config.max_pixels})
    first = ImageFiles(train, **options)
    held = None
    if validation is not None:  # what was decided from the first train images holds for these too
        options |= {"size": first.shape[:2], "channels": first.shape[2], "dtype": first.dtype, "depth": first.depth}
        held = ImageFiles(validation, **options)
    return Source(train=first, validation=held, classes=train.classes, options=("convert", "max_pixels"))


def _open_file(path: Path, config: SourceConfig) -> Source:
    if not path.is_file():  # to open a pipe would be to wait for who writes to it
        raise DataError(f"{path} is neither a file nor a directory; give {_KINDS}")
    if begins_with(path, b"PK"):
        return replace(open_npz(path, config.layout, **config.names), options=_NAMED)
    name = path.name.lower()
    if begins_with(path, _HDF5_MAGIC) or (name.endswith(_HDF5_SUFFIXES) and not begins_with(path, b"\0\0")):
        return _open_hdf5([path], config)
    if name.endswith(_TRAJECTORY_SUFFIXES):
        raise DataError(f"{path} is a trajectory, whose atoms are named in a topology; give that file with --topology")
    if name.removesuffix(".gz").endswith(TEXT_SUFFIXES):
        return _open_text(path, config)
    source = open_array(path, None if config.labels is None else Path(config.labels), config.layout)
    return replace(source, options=("labels", "layout"))


def _open_hdf5(paths: list[Path], config: SourceConfig) -> Source:
    from deepex.data.source.hdf5 import open_hdf5

    return replace(open_hdf5(paths, layout=config.layout, **config.names), options=_NAMED)


def _open_text(path: Path, config: SourceConfig) -> Source:
    """A list of picture files, or matrices."""
    if is_list(path):
        return _open_images(read_list(path), None, config)
    return _open_matrices(path, config)


def _open_matrices(path: Path, config: SourceConfig) -> Source:
    from deepex.data.source.text import open_text

    return replace(open_text(path, shape=config.matrix, dtype=config.read_dtype), options=("matrix",))


def _open_trajectory(path: Path, config: SourceConfig) -> Source:
    from deepex.data.source.trajectory import open_trajectory

    assert config.topology is not None
    train, held = _trajectories(path, config.topology) if path.is_dir() else ([path], [])
    options: dict[str, Any] = {"select": config.select, "cutoff": config.cutoff, "stride": config.stride, "pbc": config.periodic}
    source = open_trajectory(config.topology, train, held, **options)
    return replace(source, options=("select", "cutoff", "stride", "periodic"))


def _trajectories(folder: Path, topology: Path) -> tuple[list[Path], list[Path]]:
    """The trajectories in a folder, and those for validation if all are named train-… or validation-…; no topology is one."""
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(_TRAJECTORY_SUFFIXES) and not name.startswith("."))
    paths = [folder / name for name in names if (folder / name).resolve() != topology.resolve()]
    if not paths:
        raise DataError(f"{folder} has no trajectory; give a folder with files such as .dcd, .xtc or .trr")
    train, held = ([path for path in paths if path.name.startswith(part)] for part in ("train-", "validation-"))
    return (train, held) if train and held and len(train) + len(held) == len(paths) else (paths, [])


def _reshaped(source: Source, config: SourceConfig) -> Source:
    """Apply resize, crop and channels where the source has not done so while decoding."""
    from deepex.data.source.reshaped import reshaped

    train = reshaped(source.train, config.geometry, config.channels)
    validation = None if source.validation is None else reshaped(source.validation, config.geometry, config.channels)
    return replace(source, train=train, validation=validation)
