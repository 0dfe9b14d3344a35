"""Whether the AtomAI dataset is a problem: what a linear classifier makes of its pixels, and what ResNet-18 does.

    python benchmarks/atomai.py packed/atomai                 # made first, 27,000 images, if it is not there
    python benchmarks/atomai.py packed/atomai --only linear   # without ResNet-18, for a machine that has no GPU

Both are trained by DeepEx on one train part and scored on the validation part, whose specimens are others. The linear classifier
(multinomial logistic regression on the standardised pixels) gets its best of several rates and weight decays, and its best epoch,
and it is said whether that rate is the least or greatest of those tried; ResNet-18 has one setting and its last epoch, for three
seeds. Simple statistics are tried too: a classifier of the total, the deviation and the radial profile.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import bench
import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.data.dataset import PackedDataset
from deepex.training.config import RunConfig

RATES, DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0.0, 1e-3, 1e-2)


def linear(channels: int, size: tuple[int, int], classes: int) -> nn.Module:
    """Logistic regression on the pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))


def errors(config: RunConfig, folder: Path) -> list[float]:
    """The validation error after each epoch."""
    name = f"{config.net.replace(':', '-')}-{config.seed}-{config.optim.rate}-{config.optim.weight_decay}"
    run = deepex.train(config, out=folder / name)
    found = [epoch.validation.get("error") for epoch in run.epochs() if epoch.validation is not None]
    print(f"{name}: {found[-1]:.4f}, best {min(found):.4f}", flush=True)
    return found


def try_linear(data: str, folder: Path, epochs: int) -> dict[str, Any]:
    tried = {}
    for rate, decay in itertools.product(RATES, DECAYS):
        optim = OptimConfig(rate=rate, weight_decay=decay, schedule="cosine")
        config = RunConfig(net="atomai:linear", data=data, epochs=epochs, batch=128, optim=optim)
        tried[rate, decay] = min(errors(config, folder))
    best = min(tried, key=tried.__getitem__)
    return {
        "best": tried[best],
        "best_rate_is_bracketed": best[0] not in (min(RATES), max(RATES)),
        "tried": {f"rate {rate:g}, decay {decay:g}": error for (rate, decay), error in tried.items()},
    }


def try_resnet(data: str, folder: Path, epochs: int, seeds: int) -> dict[str, Any]:
    optim = OptimConfig(rate=0.05, weight_decay=5e-4, schedule="cosine", warmup_epochs=1)
    config = {"net": "resnet18", "data": data, "epochs": epochs, "batch": 128, "optim": optim}
    found = [errors(RunConfig(seed=seed, **config), folder) for seed in range(1, seeds + 1)]
    last = [each[-1] for each in found]
    return {"last": last, "median": statistics.median(last), "epochs": found[0]}


def statistics_of(data: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Total, deviation and the mean over rings around the middle, standardised by the caller."""
    samples = PackedDataset.open(data).part(part)
    images, labels = samples.read(0, samples.count)
    values = images[..., 0].astype(np.float32)
    height, width = values.shape[1:]
    rings = np.hypot(*np.mgrid[-height / 2 : height / 2, -width / 2 : width / 2]).astype(int) // 3
    profile = [values[:, rings == ring].mean(1) for ring in range(rings.max() + 1)]
    return torch.tensor(np.stack([values.mean((1, 2)), values.std((1, 2)), *profile], 1)), torch.from_numpy(labels)


def try_statistics(data: str, classes: int) -> float:
    """The validation error of a logistic regression on the statistics, fitted by LBFGS."""
    (train, labels), (held, truth) = statistics_of(data, "train"), statistics_of(data, "validation")
    mean, deviation = train.mean(0), train.std(0) + 1e-6
    train, held = (train - mean) / deviation, (held - mean) / deviation
    model = nn.Linear(train.shape[1], classes)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(model(train), labels)
        loss.backward()
        return loss

    optimiser.step(closure)
    return float((model(held).argmax(1) != truth).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="is AtomAI a problem?")
    parser.add_argument("data", help="the packed dataset; made, and its making timed, if it is not there")
    parser.add_argument("--images", type=int, default=27_000, help="how many to make")
    parser.add_argument("--keep", action="store_true", help="write the record into benchmarks/records")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["linear", "resnet18"], help="leave the other out")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    result: dict[str, Any] = {"made": bench.made("atomai", options.data, options.images)}
    manifest = PackedDataset.open(options.data).manifest
    parts = {name: part.count for name, part in manifest.parts.items()}
    result["dataset"] = {"command": manifest.source["command"], "parts": parts, "digest": manifest.digest}
    rows = [("chance", f"{1 - 1 / len(manifest.classes):.1%}")]
    with tempfile.TemporaryDirectory(prefix="deepex-atomai-") as name:
        if options.only != "resnet18":
            result["statistics"] = try_statistics(options.data, len(manifest.classes))
            rows.append(("logistic regression on mean, deviation, radial profile", f"{result['statistics']:.1%}"))
            result["linear"] = try_linear(options.data, Path(name), options.epochs)
            rows.append(("logistic regression on the pixels, its best (aim: above 30 %)", f"{result['linear']['best']:.1%}"))
        if options.only != "linear":
            result["resnet18"] = try_resnet(options.data, Path(name), options.epochs, options.seeds)
            last = ", ".join(f"{error:.1%}" for error in result["resnet18"]["last"])
            rows.append(("ResNet-18, last epoch, each seed (aim: below 10 %)", last))
    bench.print_table("AtomAI: validation error", ("classifier", "error"), rows)
    bench.write_record("_".join(filter(None, ("atomai", options.only))), result, keep=options.keep)


if __name__ == "__main__":
    main()
