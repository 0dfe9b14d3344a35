"""What a folder is taken for: hidden names, links, and texts beside pictures."""

from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from deepex.data.source import open_source


def write_pictures(folder: Path, count: int = 2) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((4, 5), number, np.uint8)).save(folder / f"{number}.png")


def test_hidden_files_beside_hdf5_are_left_alone(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((3, 4, 5), np.uint8)
    (tmp_path / "._a.h5").write_bytes(b"what macOS keeps beside a file on a foreign disk")
    assert open_source(tmp_path).train.count == 3
