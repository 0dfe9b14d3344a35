"""Steady epochs from `device`, `host` and `stream`, and from PyTorch's DataLoader on the same packed files, into the same step.

    python benchmarks/feeds.py

Without a GPU: LeNet on 28×28 images, batch 32, with one thread and with two. On a GPU: ResNet-50 on 3×224×224, bf16, batch 128. All
contestants train a network of their own with DeepEx's step on the same batches in the same order, in turns; only the feed differs.
DataLoader comes in two forms: `samples`, a dataset that gives one sample at a time, as most are written; and `batches`, one that
gathers a whole batch at once (`__getitems__`), the fastest way that we know to use it. Both read the memory-mapped files, pin
memory and keep their workers; each gets the number of workers that is best for it, by trial.
The time of an epoch is taken on the host, to the reading of its loss, which waits for the device.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

import bench
from deepex.arena.optimiser.config import OptimConfig
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset, PackedPart
from deepex.data.feeds.feed import Batch, Feed
from deepex.data.feeds.placement import Placement
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.find import SAMPLES
from deepex.data.pack import pack
from deepex.recipes.network import build_network
from deepex.record.clock import NoClock
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.learner import Learner

PLACEMENTS = ("device", "host", "stream")
FORMS = ("samples", "batches")


class PackedSamples(Dataset[Batch]):
    """A packed part, sample by sample."""

    def __init__(self, part: PackedPart) -> None:
        self.part = part

    def __len__(self) -> int:
        return self.part.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = int(np.searchsorted(self.part.bounds, index, side="right")) - 1
        packed, row = self.part.packed.files[file], index - self.part.bounds[file]
        return torch.from_numpy(self.part.open_images(packed)[row].copy()), int(self.part.open_labels(packed)[row])


class PackedBatches(PackedSamples):
    """A packed part, batch by batch."""

    def __getitems__(self, indices: list[int]) -> Batch:
        images = np.empty((len(indices), *self.part.sample_shape), self.part.dtype)
        labels = np.empty(len(indices), np.int64)
        self.part.gather(np.array(indices), images, labels)
        return torch.from_numpy(images), torch.from_numpy(labels)


class Order(Sampler[list[int]]):
    """The batches of an epoch, as DataLoader's batch sampler."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class LoaderFeed(Feed):
    """DataLoader behind the contract of a feed."""

    def __init__(self, samples: Samples, part: PackedPart, device: torch.device, *, form: str, workers: int) -> None:
        self._samples, self._device, self._order = samples, device, Order()
        self._loader: Any = DataLoader(
            PackedBatches(part) if form == "batches" else PackedSamples(part),
            batch_sampler=self._order,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is if form == "batches" else None,
        )
        self._batches: Iterator[Batch] = iter(())

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        order = self._samples.plan(epoch).order
        self._order.batches = [order[begin:end].tolist() for begin, end in self._samples.batches(turns)]
        self._batches = iter(self._loader)

    @override
    def next(self) -> Batch:
        images, labels = next(self._batches)
        return images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    @override
    def close(self) -> None:
        return


def _as_it_is(batch: Batch) -> Batch:
    return batch


def make(config: RunConfig) -> Learner:
    return Learner(build(make_job(config, SoloCommunicator(), build_network), SoloCommunicator(), clock=NoClock()))


def make_with_loader(config: RunConfig, form: str, workers: int) -> Learner:
    """A learner whose samples come from PyTorch's loader."""

    def make_feed(_placement: Placement, samples: Samples, device: torch.device, **_: object) -> LoaderFeed:
        return LoaderFeed(samples, samples.part, device, form=form, workers=workers)

    with patch("deepex.training.build.make_feed", make_feed):
        return make(dataclasses.replace(config, placement="stream"))


def best_workers(config: RunConfig, form: str, choices: Sequence[int]) -> tuple[int, Learner]:
    """The number of workers with the fastest epochs, in turns, and a learner that has them."""
    learners = {workers: make_with_loader(config, form, workers) for workers in choices}
    found = bench.in_turns({workers: bench.epochs(learner) for workers, learner in learners.items()}, 3)
    best = min(choices, key=lambda workers: min(found[workers]))
    return best, learners[best]


def compare(config: RunConfig, choices: Sequence[int], repeats: int) -> tuple[list[list[object]], dict[str, Any]]:
    """The rows of the table, and their record."""
    learners = {kind: make(dataclasses.replace(config, placement=kind)) for kind in PLACEMENTS}
    workers = {}
    for form in FORMS:
        workers[form], learners[f"DataLoader, {form}"] = best_workers(config, form, choices)
    found = bench.in_turns({name: bench.epochs(learner) for name, learner in learners.items()}, repeats)
    count = make_job(config, SoloCommunicator(), build_network).shards.count
    for kind in PLACEMENTS:
        learners[kind].parts.close()
    rows: list[list[object]] = []
    record: dict[str, Any] = {"seconds": found, "workers": workers, "images": count}
    for name, seconds in found.items():
        bases = {"device": found["device"], **{form: found[f"DataLoader, {form}"] for form in FORMS}}
        over = {base: bench.ratio(others, seconds) for base, others in bases.items()}
        speed = count / statistics.median(seconds)
        shown = name if name in PLACEMENTS else f"{name}, {workers[name.split(', ')[1]]} workers"
        rows.append([shown, f"{speed:,.0f}", *map(bench.show_ratio, over.values())])
        record[name] = {"images_per_second": speed, "over": over}
    return rows, record


def on_cpu(repeats: int) -> dict[str, Any]:
    """LeNet on 5,760 images in four files, with one thread and with two."""
    data, result = small_files(), {}
    for threads in (1, 2):
        bench.settle(threads)
        config = RunConfig(
            net="lenet", data=data, batch=32, threads=threads, verify=False, validate="none", layout="contiguous",
            optim=OptimConfig(rate=0.01),
        )  # fmt: skip
        rows, result[f"lenet, {threads} threads"] = compare(config, (0, 1, 2), repeats)
        show(f"LeNet, 28×28, batch 32, {threads} thread(s)", rows, repeats)
    return result


def on_gpu(repeats: int) -> dict[str, Any]:
    """ResNet-50 on 4,096 random images, which are more than stream's two windows hold."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    data = bench.random_data((3, 224, 224), 1000, 4096)[2]
    config = RunConfig(
        net="resnet50", data=data, batch=128, precision="bf16", verify=False, validate="none", layout="channels_last",
        optim=OptimConfig(rate=1e-4),
    )  # fmt: skip
    rows, record = compare(config, (0, 4, 8, 12), repeats)
    show(f"{torch.cuda.get_device_name()}: ResNet-50, 3×224×224, bf16, batch 128", rows, repeats)
    return {"resnet50": record}


def small_files() -> str:
    """The first images of the shipped sample, 1,440 to a file."""
    sample = PackedDataset.open(SAMPLES / "fashion")
    images, labels = sample.part("train").read(0, 5760)
    folder = Path(tempfile.mkdtemp())
    np.savez(folder / "some.npz", images=images, labels=labels)
    pack(folder / "some.npz", folder / "packed", classes=sample.manifest.classes, validation=0.0, file_bytes=1440 * 784)
    return str(folder / "packed")


def show(title: str, rows: Sequence[Sequence[object]], repeats: int) -> None:
    columns = ["feed", "img/s", "speed / device (bar 0.97)", "/ DataLoader, samples (bar 1)", "/ DataLoader, batches (bar 1)"]
    bench.print_table(f"{title}, {repeats} turns; {bench.LEGEND}", columns, rows)


def main() -> None:
    options = bench.arguments(__doc__, repeats=20)
    on_device = torch.cuda.is_available()
    result = on_gpu(options.repeats) if on_device else on_cpu(options.repeats)
    bench.write_record("feeds_gpu" if on_device else "feeds", {"results": result}, keep=options.keep)


if __name__ == "__main__":
    main()
