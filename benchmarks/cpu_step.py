"""What makes a training step fast on a CPU: memory order, compiling, bf16, threads and oneDNN, against a bare PyTorch loop.

    python benchmarks/cpu_step.py

The bare loop is the best we know: samples in memory, prepared once, gathered by index; fused SGD, gradients set to None, no
measure, no phases, and of contiguous and channels-last what is faster for it. Both sides run in one process whose heap keeps what
is freed. A time is that of an epoch of few steps, by their number; DeepEx's has its sync and the reading of its sums in it.
Each variant is compared with the bare loop on as many threads. Compiling is not in the times; its seconds stand in
the table. It is done for one memory order, the one that DeepEx's trial chooses, because it takes up to a minute.
"""

import os
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

import bench
import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError
from deepex.machine.cache import keep_compiled
from deepex.recipes.network import build_network
from deepex.task import make_task
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job, try_order
from deepex.training.learner import Learner
from one_rank import bare_steps, fused_sgd, standardised

BATCH, WITHOUT = 32, "without oneDNN"
NETS: dict[str, dict[str, Any]] = {  # and how many steps are timed at once
    "lenet": {"net": "lenet", "steps": 10},
    "resnet18": {"net": "resnet18", "steps": 1},
    "cvae": {"net": "cvae", "net_options": {"filters": 32}, "task": "reconstruct", "steps": 1},
}
ORDERS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name.replace("_", "-"): {"layout": name} for name in ORDERS},
    "compiled": {"step": "compiled"},
    **{f"bf16, {name.replace('_', '-')}": {"layout": name, "precision": "bf16"} for name in ORDERS},
    WITHOUT: {"layout": "contiguous"},
}
ON_ALL_THREADS = ("contiguous", "channels-last", "bf16, channels-last")  # the others, on one thread alone, tell enough
Contestant = Callable[[], float]


def main() -> None:
    options = bench.arguments(__doc__, repeats=12, threads=2)
    threads = sorted({1, min(options.threads, len(os.sched_getaffinity(0)))})
    bench.settle(1)
    keep_compiled(os.environ)
    results, rows = {}, []
    for name, settings in NETS.items():
        print(f"{name} …", flush=True)
        results[name] = compare(settings, threads, options.repeats)
        rows += [[name, *row] for row in table(results[name])]
    columns = ["network", "threads", "variant", "ms a step", f"to the bare loop: {bench.LEGEND}", "start (s)"]
    bench.print_table(f"one training step on a CPU, batch {BATCH}, {options.repeats} turns", columns, rows)
    bench.write_record("cpu_step", {"batch": BATCH, "repeats": options.repeats, "results": results}, keep=options.keep)


def compare(settings: dict[str, Any], threads: list[int], repeats: int) -> dict[str, Any]:
    """A network's variants in turns: seconds of a step, ratios to the bare loop of as many threads, and what is not available."""
    settings = dict(settings)
    steps = settings.pop("steps")
    _, _, data = bench.random_data((1, 28, 28), 10, steps * BATCH)
    base = {"data": data, "batch": BATCH, "validate": "none", "step": "eager", "threads": 1, **settings}
    job = try_order(make_job(config_of(base), SoloCommunicator(), build_network), SoloCommunicator())
    base["layout"] = job.config.layout
    found = {str(count): on_threads(count, base, repeats, steps) for count in threads}
    return {"compiled_layout": base["layout"], "threads": found}


def on_threads(count: int, base: dict[str, Any], repeats: int, steps: int) -> dict[str, Any]:
    """The variants on so many threads, in turns."""
    torch.set_num_threads(count)  # before anything is compiled: its loops are cut for them
    contestants = {f"bare, {order}": bare_loop(config_of(base, layout=order)) for order in ORDERS}
    bare_names, starts, missing = list(contestants), dict[str, float](), dict[str, str]()
    for name in VARIANTS if count == 1 else ON_ALL_THREADS:
        began = perf_counter()
        try:
            contestants[name] = deepex_loop(config_of(base, **VARIANTS[name]))
        except ConfigError as error:
            missing[name] = f"not available: {error}"
        starts[name] = perf_counter() - began
    if WITHOUT in contestants:
        contestants[WITHOUT] = without_onednn(contestants[WITHOUT])
    found = bench.in_turns(contestants, repeats)
    bare = min(bare_names, key=lambda name: statistics.median(found[name]))
    measured = {
        name: {
            "step_seconds": [value / steps for value in values],
            "over_bare": bench.ratio(values, found[bare]),
            "start_seconds": starts.get(name),
        }
        for name, values in found.items()
        if name == bare or name not in bare_names
    }
    return measured | missing


def table(results: dict[str, Any]) -> list[list[str]]:
    """The rows of a network."""
    rows = []
    for threads, variants in results["threads"].items():
        for name, found in variants.items():
            if isinstance(found, str):
                rows.append([threads, name, found, "", ""])
                continue
            start = "" if found["start_seconds"] is None else f"{found['start_seconds']:.1f}"
            step = f"{statistics.median(found['step_seconds']) * 1e3:.2f}"
            rows.append([threads, name, step, bench.show_ratio(found["over_bare"]), start])
    return rows


def config_of(base: dict[str, Any], **changes: Any) -> RunConfig:
    """The recipe with a variant's changes."""
    return deepex.recipe("fashion", {**base, **changes})


def bare_loop(config: RunConfig) -> Contestant:
    """Epochs of the bare loop; a call gives the seconds of one."""
    order = ORDERS[config.layout]
    job = make_job(config, SoloCommunicator(), build_network)
    task, count = make_task(config.task), job.dataset.part("train").count
    inputs, labels = standardised(job, (0, count), order)
    if not task.standardise:
        inputs.mul_(job.dataset.manifest.deviation[0]).add_(job.dataset.manifest.mean[0]).clamp_(0, 1)
    network = job.network.to(memory_format=order).train()
    optimiser = fused_sgd(network, config)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        images = inputs.index_select(0, batch)
        return task.loss(network(images), images, labels[batch])

    def epoch() -> float:
        began = perf_counter()
        bare_steps(torch.randperm(count).split(config.batch), optimiser, loss_of)
        return perf_counter() - began

    return epoch


def deepex_loop(config: RunConfig) -> Contestant:
    """Epochs of DeepEx; one that is compiled is so when this returns."""
    return bench.epochs(Learner(build(make_job(config, SoloCommunicator(), build_network), SoloCommunicator())))


def without_onednn(epoch: Contestant) -> Contestant:
    """The contestant by PyTorch's own operators. `torch.backends.mkldnn.flags` would set TF32 too, and warn that there is none."""

    def run() -> float:
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return epoch()
        finally:
            torch._C._set_mkldnn_enabled(before)

    return run


if __name__ == "__main__":
    main()
