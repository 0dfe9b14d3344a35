"""A packed dataset as one HDF5 file, for reading without packing: the same samples, in the same order.

    write_twin(PackedDataset.open("packed/atomai"), Path("/scratch/atomai.h5"), compressed=False)
    twin_settings(PackedDataset.open("packed/atomai"))     # what `deepex train --set …` needs to read the same from it

Such files are dealt in an order that is drawn once (data/direct.py), so the rows are written where that order finds them: sample k
of the packed part is sample k of the part that is read from the file. The batches of a training are the same if the packed part is
one file and was shuffled; if it is several, an epoch permutes these, and batches come in another order. Mean and deviation are
measured anew, of samples from all over the file if it has more than 256 MiB.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.direct import dealt_rows
from deepex.data.source.hdf5_dataset import opened
from deepex.errors import DataError
from deepex.record.files import write_atomic

_DIGEST: Final = "deepex_digest"  # of the packed dataset: an attribute of the file
_CHUNK_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 20


def write_twin(dataset: PackedDataset, path: Path, *, compressed: bool) -> None:
    """Write the file, whole or not at all: contiguous, or in chunks of up to a megabyte that are compressed (gzip)."""
    import h5py

    _check_classes(dataset)

    def write(temporary: Path) -> None:
        with h5py.File(temporary, "w") as file:
            for name in dataset.manifest.parts:
                _write_part(file, name, dataset.part(name), labelled=bool(dataset.manifest.classes), compressed=compressed)
            file.attrs[_DIGEST] = dataset.manifest.digest

    write_atomic(path, write)


def is_twin(path: Path, digest: str) -> bool:
    """Whether a file is the twin of the dataset with this digest."""
    if not path.is_file():
        return False
    try:
        with opened(path) as file:
            return bool(file.attrs.get(_DIGEST) == digest)
    except DataError:
        return False


def twin_settings(dataset: PackedDataset) -> dict[str, Any]:
    """The keys, beside `data`, with which a training reads the twin of a dataset as it reads the dataset."""
    low, high = dataset.manifest.scale
    held = {} if "validation" in dataset.manifest.parts else {"data_options.validation": 0.0}
    return {"data_options.layout": "NHWC", "data_options.scale": [low, high], **held}


def _write_part(file: Any, name: str, part: PackedPart, *, labelled: bool, compressed: bool) -> None:
    sample_bytes = int(np.prod(part.sample_shape)) * part.dtype.itemsize
    chunk = min(part.count, max(1, _CHUNK_BYTES // sample_bytes)) if compressed else 0
    layout = {"chunks": (chunk, *part.sample_shape), "compression": "gzip"} if compressed else {}
    images = file.create_dataset(f"x_{name}", (part.count, *part.sample_shape), part.dtype, **layout)
    labels = np.empty(part.count, np.int64)
    rows = dealt_rows((part.count, *part.sample_shape), part.dtype, band=chunk or 1, filtered=compressed)
    order = np.argsort(rows)  # which sample stands in each row of the file
    step = max(1, _BLOCK_BYTES // sample_bytes)
    step = max(step // chunk, 1) * chunk if compressed else step  # a chunk is compressed once
    for begin in range(0, part.count, step):
        here = slice(begin, min(begin + step, part.count))
        block = np.empty((here.stop - begin, *part.sample_shape), part.dtype)
        part.gather(order[here], block, labels[here])
        images[here] = block
    if labelled:
        file.create_dataset(f"y_{name}", data=labels)


def _check_classes(dataset: PackedDataset) -> None:
    """HDF5 knows classes by their labels alone: the last must have a sample, or the network would be another one."""
    named, found = len(dataset.manifest.classes), 0
    for name in dataset.manifest.parts if named else ():
        part = dataset.part(name)
        found = max(found, *(1 + int(part.open_labels(file).max()) for file in part.packed.files))
    if found < named:
        raise DataError(
            f"{dataset.directory} has {named} classes, but no sample of {dataset.manifest.classes[-1]!r}, so HDF5 of it would have "
            "fewer: leave out the format hdf5, or pack it without that class"
        )
