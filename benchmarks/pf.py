"""Whether the CVAE's latent space tells folded from unfolded: trained on contact maps alone, shown with what it was never told.

    python benchmarks/pf.py packed/pf --figure docs/pf-latent.png       # made first, 100,000 maps, if it is not there

The paper's CVAE is trained by DeepEx on the train part. Each validation map (from trajectories of their own) is encoded to its
three latent means, and compared with its fraction of native contacts, Q. Three numbers: how much of Q's variance the three
coordinates explain (a fit by quadratic least squares on one half of the maps, scored on the other); the area under the ROC curve of
that fit for folded (Q ≥ 0.65) against unfolded (Q < 0.4) maps; and, without any fit, how often a map's nearest neighbour in latent
space is of the same kind.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bench
import deepex
from deepex.data.dataset import PackedDataset
from deepex.data.simulation.folding import native_fraction
from deepex.recipes.network import build_network

FOLDED, UNFOLDED = 0.65, 0.4


def encode(config: Any, weights: Path, dataset: PackedDataset, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Latent means and fractions of native contacts of all maps of a part."""
    from safetensors.torch import load_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_network(config, dataset.manifest)
    network.load_state_dict(load_file(weights))
    network.to(device).eval()
    samples = dataset.part(part)
    means = []
    with torch.no_grad():
        for start in range(0, samples.count, 1000):
            images, _ = samples.read(start, min(start + 1000, samples.count))
            means.append(network(torch.from_numpy(images).to(device, torch.float32).permute(0, 3, 1, 2))[1].cpu().numpy())
    maps, _ = samples.read(0, samples.count)
    return np.concatenate(means), native_fraction(maps, dataset.manifest.source["native_pairs"])


def quadratic(latent: np.ndarray) -> np.ndarray:
    """All products of up to two coordinates."""
    ones = np.concatenate([np.ones((len(latent), 1)), latent], 1)
    first, second = np.triu_indices(ones.shape[1])
    return ones[:, first] * ones[:, second]


def separation(latent: np.ndarray, native: np.ndarray) -> dict[str, float]:
    half = len(latent) // 2
    weights = np.linalg.lstsq(quadratic(latent[:half]), native[:half], rcond=None)[0]
    fit, truth = quadratic(latent[half:]) @ weights, native[half:]
    explained = 1 - np.square(truth - fit).sum() / np.square(truth - truth.mean()).sum()
    folded, unfolded = fit[truth >= FOLDED], fit[truth < UNFOLDED]
    area = (folded[:, None] > unfolded[None, :]).mean()
    clear = (native >= FOLDED) | (native < UNFOLDED)
    some, kind = torch.from_numpy(latent[clear][:4000]), native[clear][:4000] >= FOLDED
    distances = torch.cdist(some, some).fill_diagonal_(torch.inf)
    nearest = distances.argmin(1).numpy()
    return {"explained": float(explained), "area": float(area), "neighbours": float((kind == kind[nearest]).mean())}


def draw(latent: np.ndarray, native: np.ndarray, path: Path) -> None:
    """Q as colour over two pairs of latent coordinates, and Q against the fit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
    for axis, (x, y) in zip(axes, ((0, 1), (0, 2), (1, 2)), strict=True):
        points = axis.scatter(latent[:, x], latent[:, y], c=native, s=2, cmap="viridis", vmin=0, vmax=1, rasterized=True)
        axis.set_xlabel(f"latent {x + 1}")
        axis.set_ylabel(f"latent {y + 1}")
    figure.colorbar(points, ax=axes, label="fraction of native contacts")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="does the latent space tell folded from unfolded?")
    parser.add_argument("data", help="the packed dataset; made, and its making timed, if it is not there")
    parser.add_argument("--images", type=int, default=100_000, help="how many to make")
    parser.add_argument("--keep", action="store_true", help="write the record into benchmarks/records")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="pf")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    making = bench.made("pf", options.data, options.images)
    dataset = PackedDataset.open(options.data)
    results = []
    for seed in range(1, options.seeds + 1):
        changes = {"data": options.data, "epochs": options.epochs, "seed": seed, "precision": options.precision}
        config = deepex.recipe(options.recipe, changes)
        with tempfile.TemporaryDirectory(prefix="deepex-pf-") as name:
            run = deepex.train(config, out=Path(name) / "run")
            latent, native = encode(config, run.path / "weights.safetensors", dataset, "validation")
            rmse = [epoch.validation.get("rmse") for epoch in run.epochs() if epoch.validation is not None]
        results.append(separation(latent, native) | {"rmse": rmse})
        print({key: value for key, value in results[-1].items() if key != "rmse"}, f"rmse {rmse[-1]:.4f}", flush=True)
        if seed == 1 and options.figure is not None:
            draw(latent, native, options.figure)
    manifest = dataset.manifest
    parts = {name: part.count for name, part in manifest.parts.items()}
    result = {
        "made": making,
        "dataset": {"command": manifest.source["command"], "parts": parts, "digest": manifest.digest},
        "recipe": options.recipe,
        "precision": options.precision,
        "epochs": options.epochs,
        "seeds": results,
    }
    rows = [
        (what, ", ".join(f"{each[key]:.3f}" for each in results))
        for what, key in (
            ("variance of Q explained by the three latent coordinates", "explained"),
            ("area under the ROC curve, folded against unfolded", "area"),
            ("nearest neighbour of the same kind", "neighbours"),
        )
    ]
    bench.print_table("PF: the latent space of the validation part, each seed", ("what", "value"), rows)
    bench.write_record("pf", result, keep=options.keep)


if __name__ == "__main__":
    main()
