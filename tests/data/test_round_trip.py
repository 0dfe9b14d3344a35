"""From files of every format, written by another library, to a trained and resumed network.

In each the images of class k are brighter than those of class k - 1, so that a network that learns shows that images and labels
came through together; an autoencoder's error falls.
"""

import dataclasses
import gzip
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from typer.testing import CliRunner

import deepex
from deepex.cli.data import app
from deepex.record import EpochRecord
from tests.mpi import run_deepex

CLASSES, PER_CLASS = 3, 40
Maker = Callable[[Path, np.ndarray, np.ndarray], list[str]]


def images_and_labels(channels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(CLASSES * PER_CLASS) % CLASSES
    noise = np.random.default_rng(0).integers(0, 40, (len(labels), 28, 28, channels))
    return (np.array([0, 90, 200])[labels][:, None, None, None] + noise).astype(np.uint8), labels


def png(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "png" / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(path)
    return [str(folder / "png")]


def jpeg(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    """In a list file, larger than they will be, monochrome to three channels."""
    lines = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image[..., 0]).resize((60, 48)).save(folder / f"{number}.jpg", quality=95)
        lines.append(f"{number}.jpg kind{label}\n")
    (folder / "list.txt").write_text("".join(lines))
    assert simplejpeg.is_jpeg((folder / "0.jpg").read_bytes())
    return [str(folder / "list.txt"), "--resize", "28", "--crop", "28", "--channels", "3"]


def hdf5(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    """Two files, chunked and compressed, under unusual names, channels first."""
    for half in range(2):
        with h5py.File(folder / f"part{half}.h5", "w") as file:
            part = slice(half * 60, half * 60 + 60)
            values = images[part].transpose(0, 3, 1, 2)
            file.create_dataset("entry/frames", data=values, chunks=(7, 1, 28, 28), compression="lzf", shuffle=True)
            file.create_dataset("entry/kind", data=labels[part].astype(np.int8))
    return [str(folder), "--images", "entry/frames", "--labels", "entry/kind"]


def npz(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    np.savez_compressed(folder / "a.npz", x_train=images[:90], y_train=labels[:90], x_test=images[90:], y_test=labels[90:])
    return [str(folder / "a.npz")]


def npy(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    np.save(folder / "i.npy", images.astype(np.float64) / 255)
    np.save(folder / "l.npy", labels)
    return [str(folder / "i.npy"), "--labels", str(folder / "l.npy")]


def idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    for name, code, values in (("images-idx3", 3, images[..., 0]), ("labels-idx1", 1, labels.astype(np.uint8))):
        header = struct.pack(f">BBBB{code}I", 0, 0, 8, code, *values.shape)
        (folder / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))
    return [str(folder)]


def text(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "text" / f"{label}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, image[..., 0], fmt="%d")
    return [str(folder / "text")]


def cifar(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    """The binary version: a label, then 32×32 of red, of green, of blue."""
    padded = np.pad(images.repeat(3, axis=3), ((0, 0), (2, 2), (2, 2), (0, 0))).transpose(0, 3, 1, 2)
    for number in range(6):
        part = slice(number * 20, number * 20 + 20)
        records = np.concatenate([labels[part, None].astype(np.uint8), padded[part].reshape(20, -1)], axis=1)
        (folder / (f"data_batch_{number + 1}.bin" if number < 5 else "test_batch.bin")).write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(f"name{k}" for k in range(10)) + "\n")
    return [str(folder)]


MAKERS: dict[str, Maker] = {m.__name__: m for m in (png, jpeg, hdf5, npz, npy, idx, text, cifar)}


CHANGES: dict[str, Any] = {"net": "lenet", "batch": 4, "replicas": 2, "optim.rate": 0.02, "threads": 1, "layout": "contiguous"}


def train_and_resume(folder: Path, **changes: Any) -> list[EpochRecord]:
    """Two epochs of two replicas, then four more."""
    config = deepex.recipe("fashion", CHANGES | changes | {"data": str(folder / "packed"), "epochs": 2})
    deepex.train(config, out=folder / "run")
    return deepex.train(dataclasses.replace(config, epochs=6), out=folder / "run", resume=True).epochs()


@pytest.mark.parametrize("kind", MAKERS)
def test_pack_train_resume(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    words = MAKERS[kind](source, *images_and_labels())
    arguments = ["pack", *words[:1], str(tmp_path / "packed"), *words[1:], "--validation", "0.2", "--workers", "1", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    kept = sum(part["count"] for part in json.loads(done.stdout)["parts"].values())
    assert kept == CLASSES * PER_CLASS
    epochs = train_and_resume(tmp_path)
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3, 4, 5, 6]
    assert epochs[-1].validation is not None
    assert epochs[-1].validation.get("error") is not None
    assert epochs[-1].validation.get("error") <= 0.1


@pytest.mark.slow
def test_the_same_on_ranks_with_the_commands_of_a_user(tmp_path: Path) -> None:
    words = png(tmp_path, *images_and_labels())
    done = run_deepex("data", "pack", *words, str(tmp_path / "packed"), "--workers", "2")
    assert done.returncode == 0, done.stderr
    sets = ["--set", "epochs=2", "--set", "batch=4", "--set", "net=lenet", "--set", f"data={tmp_path / 'packed'}", "--quiet"]
    done = run_deepex("train", "fashion", "--ranks", "2", *sets, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    done = run_deepex("train", "--resume", str(tmp_path / "run"), "--ranks", "1", "--set", "epochs=3", "--quiet")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "epochs.jsonl").read_text().splitlines()) == 3


def test_pack_train_resume_of_a_trajectory(tmp_path: Path) -> None:
    """A chain of 28 beads that folds up and stretches, written as DCD by MDAnalysis."""
    import MDAnalysis

    universe = MDAnalysis.Universe.empty(28, n_residues=28, atom_resindex=np.arange(28), trajectory=True)
    universe.add_TopologyAttr("name", ["CA"] * 28)
    universe.add_TopologyAttr("resname", ["ALA"] * 28)
    universe.add_TopologyAttr("resid", np.arange(1, 29))
    for key, value in {
        "altLoc": "",
        "icode": "",
        "occupancy": 1.0,
        "tempfactor": 0.0,
        "record_type": "ATOM",
        "chainID": "A",
    }.items():
        universe.add_TopologyAttr(key if key != "altLoc" else "altLocs", [value] * 28)
    random = np.random.default_rng(0)
    with MDAnalysis.Writer(str(tmp_path / "run.dcd"), 28) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chain has no periodic box
        for frame in range(150):
            turn = np.arange(28) * (0.3 + 0.9 * np.sin(frame / 8) ** 2)
            coil = np.stack([6 * np.cos(turn), 6 * np.sin(turn), 1.2 * np.arange(28)], 1)
            universe.atoms.positions = coil + random.normal(0, 0.3, coil.shape)
            if frame == 0:
                universe.atoms.write(str(tmp_path / "top.pdb"))
            writer.write(universe.atoms)
    words = [str(tmp_path / "run.dcd"), str(tmp_path / "packed"), "--topology", str(tmp_path / "top.pdb"), "--validation", "0.2"]
    CliRunner().invoke(app, ["pack", *words, "--workers", "1"], catch_exceptions=False)
    changes = {"net": "cvae", "net_options.filters": 4, "task": "reconstruct", "optim.rate": 0.001}
    first, *_, last = [epoch.validation for epoch in train_and_resume(tmp_path, **changes)]
    assert first is not None
    assert last is not None
    assert last.measures["rmse"] < first.measures["rmse"]
