"""One rank against a bare PyTorch loop on the same batch order, and what the phase profile costs.

    python benchmarks/one_rank.py

The bare loop is the best we know for the case: samples already in memory, standardised once, as float32, gathered by index, fused
SGD, gradients set to None, and the memory order, contiguous or channels-last, that is faster for it. It measures no phases and
counts no errors until its epoch ends. Both sides run in one process whose heap keeps what is freed, as DeepEx sets it for a run.

The profile's cost is measured in two ways: with and without a clock, in turns, which carries the machine's noise; and as the time
of its own calls, counted and timed alone.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional

import bench
import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.feeds.order import epoch_order
from deepex.recipes.network import build_network
from deepex.record.clock import HostClock, NoClock, PhaseClock
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job, try_order
from deepex.training.job import Job
from deepex.training.learner import Learner

WORKLOADS = {"lenet": 960, "lenet-caffe": 960, "resnet18": 64}


def standardised(job: Job, bounds: tuple[int, int], order: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of the training samples within `bounds`, ready for the network."""
    manifest = job.dataset.manifest
    images, labels = (torch.from_numpy(array) for array in job.dataset.part("train").read(*bounds))
    inputs = torch.empty((len(images), *manifest.shape), memory_format=order).copy_(images.permute(0, 3, 1, 2))
    return inputs.div_(255).sub_(manifest.mean[0]).div_(manifest.deviation[0]), labels


def fused_sgd(network: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """PyTorch's fastest optimiser for the configuration."""
    optim = config.optim
    return torch.optim.SGD(
        network.parameters(), lr=optim.rate, momentum=optim.momentum, weight_decay=optim.weight_decay, fused=True
    )


def bare_loop(config: RunConfig, count: int, order: torch.memory_format) -> Callable[[], float]:
    """Epochs of the bare loop; a call gives the seconds of one."""
    job = make_job(config, SoloCommunicator(), build_network)
    inputs, labels = standardised(job, (0, job.dataset.part("train").count), order)
    shards, network = job.shards, job.network.to(memory_format=order).train()
    optimiser = fused_sgd(network, config)
    state = {"epoch": 0}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(network(inputs.index_select(0, batch)), labels[batch])

    def epoch() -> float:
        began = perf_counter()
        keys = {"seed": config.seed, "epoch": state["epoch"], "sample_bytes": job.dataset.manifest.sample_bytes}
        order = torch.from_numpy(epoch_order(shards.bounds(0), job.dataset.part("train").bounds, replica=0, **keys))
        state["epoch"] += 1
        bare_steps(order[:count].split(config.batch), optimiser, loss_of)
        return perf_counter() - began

    return epoch


def bare_steps(
    batches: Sequence[torch.Tensor], optimiser: torch.optim.Optimizer, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A step of plain PyTorch for each batch; the loss is summed on the device and read at the end."""
    total = torch.zeros(())
    for batch in batches:
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        optimiser.step()
        total += loss.detach() * len(batch)
    total.item()


def deepex_epochs(config: RunConfig, clock: PhaseClock) -> tuple[Callable[[], float], nn.Module]:
    """The learner's epochs; a call gives the seconds of one, its sync and the reading of its sums included."""
    job = make_job(config, SoloCommunicator(), build_network)
    return bench.epochs(Learner(build(job, SoloCommunicator(), clock=clock))), job.network


def main() -> None:
    options = bench.arguments(__doc__, repeats=60, threads=1)
    bench.settle(options.threads)
    torch.backends.cudnn.allow_tf32 = False
    rows, result = [], {}
    for net, samples in WORKLOADS.items():
        config = deepex.recipe("fashion", {"net": net, "batch": 32, "threads": options.threads, "data": small_data(samples)})
        job = try_order(make_job(config, SoloCommunicator(), build_network), SoloCommunicator())
        config = job.config
        print(f"{net}: {config.layout}, {job.plan.reasons['layout']}")
        ours, _ = deepex_epochs(config, HostClock())
        silent, _ = deepex_epochs(config, NoClock())
        orders = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
        bare = {name: bare_loop(config, samples, order) for name, order in orders.items()}
        found = bench.in_turns({**bare, "deepex": ours, "no clock": silent}, options.repeats)
        best = min(orders, key=lambda name: statistics.median(found[name]))
        found["bare"] = found[best]
        against = bench.ratio(found["deepex"], found["bare"])
        profile = bench.ratio(found["deepex"], found["no clock"])
        speed = samples / sorted(found["deepex"])[len(found["deepex"]) // 2]
        own = mark_seconds() * marks_per_epoch(samples, config.batch) / bench.fast(found["deepex"])
        rows.append([net, samples, f"{speed:,.0f}", best, bench.show_ratio(against), bench.show_ratio(profile), f"{own:.3%}"])
        result[net] = {
            "seconds": found,
            "layout": config.layout,
            "deepex_over_bare": against,
            "profile_over_none": profile,
            "profile_own_share": own,
        }
    columns = [
        "network",
        "images",
        "img/s",
        "bare loop's best",
        "DeepEx / bare loop (bar 1.03)",
        "with / without profile",
        "profile's own time (bar 1 %)",
    ]
    bench.print_table(
        f"time of an epoch, one rank, {options.threads} thread(s), batch 32, {options.repeats} turns; {bench.LEGEND}",
        columns,
        rows,
    )
    bench.write_record("one_rank", {"threads": options.threads, "results": result}, keep=options.keep)


def mark_seconds(calls: int = 200_000) -> float:
    """The time of one mark of the clock."""
    clock = HostClock()
    began = perf_counter()
    for _ in range(calls):
        clock.mark(0)
    return (perf_counter() - began) / calls


def marks_per_epoch(samples: int, batch: int) -> int:
    """Four marks a step, and three at the sync."""
    return 4 * -(-samples // batch) + 3


def small_data(samples: int) -> str:
    """The shipped sample, or its first images."""
    if samples == 6000:
        return "sample:fashion"
    import numpy as np

    from deepex.data.dataset import PackedDataset
    from deepex.data.find import SAMPLES
    from deepex.data.pack import pack

    sample = PackedDataset.open(SAMPLES / "fashion")
    images, labels = sample.part("train").read(0, samples)
    folder = Path(tempfile.mkdtemp())
    np.savez(folder / "some.npz", images=images, labels=labels)
    pack(folder / "some.npz", folder / "packed", classes=sample.manifest.classes, validation=0.0)
    return str(folder / "packed")


if __name__ == "__main__":
    main()
