"""From what a configuration says of its data to an open dataset.

open_dataset("sample:fashion", {})          # one that comes with DeepEx
open_dataset("packed/mine", {})             # a packed dataset
open_dataset("patterns.h5", {"images": "x"})    # HDF5 files as they are
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepex.data.dataset import PackedDataset
from deepex.data.direct import Hdf5Config, Hdf5Dataset, find_hdf5
from deepex.errors import ConfigError, UnknownName
from deepex.record.table import from_table

SAMPLES: Final = Path(__file__).parent / "samples"
OpenDataset = PackedDataset | Hdf5Dataset


def open_dataset(data: str, options: Mapping[str, Any]) -> OpenDataset:
    """Open a packed dataset, or HDF5 files as they are."""
    path = find_data(data)
    if find_hdf5(path):
        return Hdf5Dataset.open(path, from_table(Hdf5Config, options, "data_options."))
    if options:
        raise ConfigError(f"data_options are for HDF5 files that are read without packing, but {path} is none: leave them out")
    return PackedDataset.open(path)


def find_data(data: str) -> Path:
    """Find the directory of a dataset; `sample:NAME` is one that comes with DeepEx."""
    kind, colon, name = data.partition(":")
    if not (colon and kind == "sample"):
        return Path(data)
    names = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
    if name not in names:
        raise UnknownName("sample dataset", name, names)
    return SAMPLES / name
