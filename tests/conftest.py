"""What all tests share: small real data, made by our own packing from the shipped sample."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from deepex.data.dataset import PackedDataset
from deepex.data.find import SAMPLES
from deepex.data.pack import pack
from tests.full import examples
from tests.marks import ByFile, mark
from tests.pool import RankPool

gc.disable()  # until all tests are collected: what is loaded and listed stays
torch.set_num_threads(1)
os.environ.pop("PYTHONUNBUFFERED", None)  # with it, print() writes a line in two pieces, and lines of ranks run into each other
if not torch.cuda.is_available():  # then Triton interprets its kernels, which it must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("deepex", deadline=None, max_examples=examples(25, 100))  # no test times anything
settings.load_profile("deepex")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let every test have its marks before tests are chosen by them."""
    mark(item)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """With `-n 2`, say who runs what."""
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """From here on, look for garbage among what tests make."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At the end again among all: else Triton complains of what it is still to let go."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Pack the first `count` training images of the shipped sample, and 64 for validation; one directory per count."""
    made: dict[int, Path] = {}

    def make(count: int) -> Path:
        if count not in made:
            folder = tmp_path_factory.mktemp(f"data{count}")
            sample = PackedDataset.open(SAMPLES / "fashion")
            images, labels = sample.part("train").read(0, count)
            held, held_labels = sample.part("validation").read(0, 64)
            np.savez(folder / "some.npz", x_train=images, y_train=labels, x_test=held, y_test=held_labels)
            pack(folder / "some.npz", folder / "packed", classes=sample.manifest.classes, file_bytes=40_000)
            made[count] = folder / "packed"
        return made[count]

    return make


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks that stay for all tests of this process (pool.py)."""
    with RankPool() as pool:
        yield pool
