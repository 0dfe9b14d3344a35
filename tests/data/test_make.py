"""The simulated datasets as a user makes them, and the samples of them that come along."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deepex.cli.data import app
from deepex.comm import as_communicator
from deepex.data.dataset import PackedDataset
from deepex.data.find import SAMPLES
from deepex.data.make import make
from deepex.data.simulation import folding
from deepex.data.simulation.folding import native_fraction
from deepex.data.simulation.kept import claim
from deepex.errors import DataError, UnknownName
from tests.mpi import run_ranks
from tests.pool import RankPool

MOST_BYTES = 12_000_000  # of the two samples together


@pytest.mark.slow
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


def kept(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir()}


def test_trajectories_of_another_request_are_not_touched_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, keep = tmp_path / "out", tmp_path / "kept"
    make("pf", out, images=20, keep=keep)
    before = kept(keep)
    assert set(before) == {"request.json", "topology.pdb", "train-00000.dcd", "validation-00000.dcd"}
    manifest = (out / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(folding, "simulate", None)  # they are refused before that
        for other in ({"images": 20, "seed": 2}, {"images": 30}):
            with pytest.raises(DataError, match=r"train-00000.dcd, of --images 20 --seed 1 and not of --images .*--overwrite"):
                make("pf", tmp_path / "other", **other, keep=keep)
    assert kept(keep) == before
    assert (out / "manifest.json").read_bytes() == manifest
    (keep / "train-00007.dcd").touch()
    (keep / "mine.dcd").touch()
    make("pf", out, images=20, seed=2, keep=keep, overwrite=True)
    after = kept(keep)
    assert set(after) == set(before) | {"mine.dcd"}
    assert after["train-00000.dcd"] != before["train-00000.dcd"]


def test_the_same_request_goes_on_beside_its_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, keep = tmp_path / "out", tmp_path / "kept"
    simulate, begun = folding.simulate, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        begun.append(1)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return simulate(*arguments, **options)

    monkeypatch.setattr(folding, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make("pf", out, images=20, keep=keep)
    first = kept(keep)
    assert "train-00000.dcd" in first
    make("pf", out, images=20, keep=keep)
    assert len(begun) == 3  # the first trajectory is not made again
    assert first.items() < kept(keep).items()


def test_trajectories_of_nobody_known_are_not_touched(tmp_path: Path) -> None:
    for written in (None, "{", "[]", "3", "[" * 100_000):
        (tmp_path / "train-00000.dcd").touch()
        if written is not None:
            (tmp_path / "request.json").write_text(written)
        with pytest.raises(DataError, match="a request that is not known and not of --images 20 --seed 1"):
            claim(tmp_path, {"images": 20, "seed": 1}, overwrite=False)
    claim(tmp_path, {"images": 20, "seed": 1}, overwrite=True)
    assert json.loads((tmp_path / "request.json").read_text()) == {"images": 20, "seed": 1}
    assert not (tmp_path / "train-00000.dcd").exists()


@pytest.mark.slow
def test_ranks_find_trajectories_of_another_request_together(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "train-00000.dcd").touch()
    words = ["-m", "deepex", "data", "make", "pf", str(tmp_path / "out"), "--images", "20"]
    words += ["--keep-trajectories", str(tmp_path / "kept"), "--workers", "1"]
    refused = run_ranks(2, *words)
    assert refused.returncode == 2
    assert refused.stderr.count("has trajectories, such as train-00000.dcd") == 1
    assert "Traceback" not in refused.stderr
    ranks.run(make_on_ranks, tmp_path / "out", tmp_path / "kept")
    assert (tmp_path / "kept" / "train-00000.dcd").stat().st_size


def make_on_ranks(comm: Any, out: str, keep: str) -> None:
    """As the command does with --overwrite."""
    ours = as_communicator(comm)
    make("pf", Path(out), images=20, keep=Path(keep), workers=1, overwrite=True, comm=ours)
    ours.close()


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean atomai"):
        make("atomia", tmp_path / "out", images=1000)
    with pytest.raises(DataError, match="images is 100; it must be at least 270"):
        make("atomai", tmp_path / "out", images=100)
    with pytest.raises(DataError, match="--engine gpu was given, but has no effect on pf: it is for atomai only; leave it out"):
        make("pf", tmp_path / "out", images=20, engine="gpu")
    with pytest.raises(DataError, match=r"--keep-trajectories .*kept was given, but has no effect on atomai: it is for pf only"):
        make("atomai", tmp_path / "out", images=297, keep=tmp_path / "kept")
    assert not list(tmp_path.iterdir())


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
