"""The simulated datasets as a user makes them, and the samples of them that come along."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deepex.cli.data import app
from deepex.data.dataset import PackedDataset
from deepex.data.make import make
from deepex.data.simulation.folding import native_fraction
from deepex.errors import DataError, UnknownName
from deepex.recipes.job import SAMPLES

MOST_BYTES = 12_000_000  # of the two samples together


def test_diffraction_is_made_balanced_and_says_how(tmp_path: Path) -> None:
    words = ["make", "atomai", str(tmp_path / "out"), "--images", "297", "--workers", "1", "--engine", "cpu", "--json"]
    manifest = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert manifest["shape"] == [1, 120, 85]
    assert len(manifest["classes"]) == 27
    assert {name: part["count"] for name, part in manifest["parts"].items()} == {"train": 270, "validation": 27}
    assert manifest["source"]["command"] == "deepex data make atomai OUT --images 297 --seed 1"
    assert {"thickness", "defocus", "tilt", "dose"} <= set(manifest["source"]["nuisances"])
    dataset = PackedDataset.open(tmp_path / "out")
    assert dataset.verify() == []
    _, labels = dataset.part("train").read(0, 270)
    assert np.bincount(labels).tolist() == [10] * 27
    assert (np.diff(labels) != 0).mean() > 0.8  # shuffled


def test_folding_is_made_the_same_from_the_same_seed(tmp_path: Path) -> None:
    made = [make("pf", tmp_path / f"{k}", images=20, seed=seed) for k, seed in enumerate((3, 3, 4))]
    assert made[0].shape == (1, 28, 28)
    assert made[0].scale == (0.0, 1.0)
    assert not made[0].classes
    assert {name: part.count for name, part in made[0].parts.items()} == {"train": 18, "validation": 2}
    assert made[0].parts == made[1].parts  # digests too
    assert made[0].parts != made[2].parts
    maps, _ = PackedDataset.open(tmp_path / "0").part("train").read(0, 18)
    assert (maps == maps.transpose(0, 2, 1, 3)).all()


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean atomai"):
        make("atomia", tmp_path / "out", images=1000)
    with pytest.raises(DataError, match="images is 100; it must be at least 270"):
        make("atomai", tmp_path / "out", images=100)


@pytest.mark.parametrize(("name", "least"), [("atomai", 27 * 60), ("pf", 10_000)])
def test_a_sample_is_whole_and_made_by_the_command_that_it_names(name: str, least: int) -> None:
    dataset = PackedDataset.open(SAMPLES / name)
    assert dataset.verify() == []
    assert sum(part.count for part in dataset.manifest.parts.values()) >= least
    assert dataset.manifest.source["command"].startswith(f"deepex data make {name} OUT --images ")
    assert dataset.manifest.source["seed"] == 1
    sizes = [path.stat().st_size for sample in ("atomai", "pf") for path in (SAMPLES / sample).iterdir()]
    assert sum(sizes) < MOST_BYTES


def test_the_sample_of_pf_folds_and_unfolds() -> None:
    dataset = PackedDataset.open(SAMPLES / "pf")
    maps, _ = dataset.part("train").read(0, 10_000)
    native = native_fraction(maps, dataset.manifest.source["native_pairs"])
    assert (native >= 0.65).mean() > 0.2
    assert (native < 0.4).mean() > 0.1
