"""Small networks for the tests, as a user would bring them: `--set net=tests.networks:plain`."""

import os
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from deepex.record import run


def plain(channels: int, size: tuple[int, int], classes: int) -> nn.Module:
    """No batch norm, no randomness: the arithmetic of a mean over replicas can be followed exactly."""
    height, width = size
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * -(-height // 2) * -(-width // 2), classes),
    )


def normed(channels: int, classes: int) -> nn.Module:
    """Batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=4, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


class Looking(nn.Module):
    """Looks around in each forward pass, as a test says. Products by element, which every CPU has in bf16."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(classes))

    def look(self) -> None:
        raise NotImplementedError

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.look()
        return images.flatten(1)[:, : len(self.gain)] * self.gain


def telling(classes: int) -> nn.Module:
    """Leaves in the file $TELL how long PyTorch's heap keeps what is freed, as PyTorch was told when it was loaded."""
    Path(os.environ["TELL"]).write_text(os.environ.get("MIMALLOC_PURGE_DELAY", "not told"), encoding="ascii")
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))


def exploding(classes: int) -> nn.Module:
    """Turns to NaN from its third forward pass on."""

    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.LazyLinear(classes) if classes < 0 else nn.Linear(784, classes)
            self.calls = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            factor = float("nan") if self.calls > int(os.environ.get("EXPLODE_AFTER", "2")) else 1.0
            return self.dense(images.flatten(1)) * factor

    return Exploding()


def warning(classes: int) -> nn.Module:
    """Warns in its forward pass."""

    class Warns(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            warnings.warn("this network is only for tests", stacklevel=1)
            return super().forward(images.flatten(1))

    return Warns(784, classes)


class _Stumbling(nn.Module):
    """Dense layers with batch norm, whose outputs are multiplied in passes of training that STUMBLES tells: "rank:pass:nan,…"."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, classes))
        places = (place.split(":") for place in os.environ.get("STUMBLES", "").split(",") if place)
        self.factors = {int(number): float(factor) for rank, number, factor in places if rank == _own_rank()}
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.layers(images) * (self.factors.get(self.calls, 1.0) if self.training else 1.0)


def stumbling(classes: int) -> nn.Module:
    return _Stumbling(classes)


def _own_rank() -> str:
    return os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"


class _Troubled(nn.Module):
    """A dense layer that on one rank is slow, or fails, as the variables TROUBLE and TROUBLED_RANK say."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(784, classes)
        self.calls = 0
        self.trouble = os.environ.get("TROUBLE", "") if _own_rank() == os.environ.get("TROUBLED_RANK") else ""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.trouble == "slow" and self.training:
            time.sleep(0.02)
        if self.trouble == "fail" and self.calls == 3:
            raise RuntimeError("the accelerator fell off the bus")
        if self.trouble == "die" and self.calls == 3:
            os.kill(os.getpid(), 9)
        return self.dense(images.flatten(1))


def troubled(classes: int) -> nn.Module:
    """See _Troubled. With SLOW_DISK, rank 0 has read `run.json` and writes what was set up after another has failed, or late."""
    if os.environ.get("SLOW_DISK") and _own_rank() == "0":
        write = run.write_json

        def write_late(path: Path, value: dict[str, object]) -> None:
            until = time.monotonic() + ("setup_seconds" in value)
            while time.monotonic() < until and not (path.exists() and '"failed"' in path.read_text()):
                time.sleep(0.001)
            write(path, value)

        run.write_json = write_late
    return _Troubled(classes)


def batch_normed(channels: int, classes: int) -> nn.Module:
    """Batch norm without dropout."""
    return nn.Sequential(*(layer for layer in normed(channels, classes) if not isinstance(layer, nn.Dropout)))


def held_norm(channels: int, classes: int) -> nn.Module:
    """Two batch norms: the first keeps the statistics of whoever trained it before, the second has its own."""
    network = nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=4, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )
    nn.init.uniform_(network[1].running_mean)
    nn.init.uniform_(network[1].running_var, 0.5, 2.0)
    network[1].eval()
    return network


def evaluating(channels: int, classes: int) -> nn.Module:
    """In evaluation mode as a whole, as libraries give what is trained already."""
    return batch_normed(channels, classes).eval()


class _Counting(nn.Linear):
    """Keeps a mean and a count in buffers that it replaces, rather than writes to them."""

    def __init__(self, classes: int) -> None:
        super().__init__(784, classes)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = super().forward(images.flatten(1))
        if self.training:
            self.mean, self.count = 0.9 * self.mean + output.mean(), self.count + 1
        return output


def counting(classes: int) -> nn.Module:
    """See _Counting."""
    return _Counting(classes)


def masked(classes: int) -> nn.Module:
    """Has integer and boolean buffers that are not contiguous: a transposed one and an expanded one."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
    network.register_buffer("mask", torch.ones(4, 5, dtype=torch.bool).triu().t())
    network.register_buffer("places", torch.arange(5).expand(3, 5))
    return network


class Passing(nn.Module):
    """Has buffers that belong to its state, and some of the moment: `persistent=False`."""

    seen: torch.Tensor
    steps: torch.Tensor
    scale: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(classes))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("steps", torch.tensor(0), persistent=False)
        self.register_buffer("scale", torch.ones(classes), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        self.steps += 1
        return images.flatten(1)[:, : len(self.gain)] * self.gain * self.scale


def with_passing_buffers(classes: int = 10) -> nn.Module:
    """A network with buffers of the moment."""
    return Passing(classes)
