"""What sampling a run's resources costs on a GPU, where the sampler asks its driver too.

    python benchmarks/gpu_sampling.py

Captured epochs with and without a sampler beside them, in turns in one process, one to two seconds each; timed from the first to
the last kernel by the host's clock. Beside the ratio stands the sampler's own time, as a share of one core.
"""

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

import bench
from deepex.training.config import RunConfig
from deepex.training.usage import gpu_identifier
from gpu import WORKLOADS, deepex_epochs
from peers import Workload
from sampling import Cost, sampled

CHOSEN = ("lenet-128", "resnet50-120x85-128")
TURN_SECONDS = 1.5


def several(epoch: Callable[[], None], times: int) -> Callable[[], float]:
    """The seconds of so many epochs."""

    def run() -> float:
        began = perf_counter()
        for _ in range(times):
            epoch()
        torch.cuda.synchronize()
        return perf_counter() - began

    return run


def measure(workload: Workload, interval: float, repeats: int) -> tuple[list[str], dict[str, object]]:
    """A row of the table, and what goes into the record."""
    *_, data = bench.random_data(workload.shape, workload.classes, workload.count)
    epoch, learner = deepex_epochs(workload, data)
    plain = several(epoch, 1)
    plain()
    plain = several(epoch, max(1, round(TURN_SECONDS / plain())))
    costs: list[Cost] = []
    gpu = gpu_identifier(torch.device("cuda", torch.cuda.current_device()))
    beside = sampled(plain, learner.parts.clock, interval, costs, gpu)
    found = bench.in_turns({"sampled": beside, "not sampled": plain}, repeats)
    costs = costs[-repeats:]
    ratio = bench.ratio(found["sampled"], found["not sampled"])
    own = sum(cost.sampler_seconds + cost.trainer_seconds for cost in costs) / sum(found["sampled"])
    each = sum(cost.sampler_seconds for cost in costs) / max(1, sum(cost.num_samples for cost in costs))
    seconds = f"{statistics.median(found['sampled']):.2f}"
    row = [workload.name, seconds, bench.show_ratio(ratio), f"{own:.2%}", f"{each * 1e6:.0f}"]
    return row, {"seconds": found, "sampled_over_not": ratio, "own_share": own, "sample_seconds": each}


def main() -> None:
    options = bench.arguments(__doc__, repeats=20)
    bench.need_gpu()
    interval = RunConfig(net="", data="").sampling
    found = {workload.name: measure(workload, interval, options.repeats) for workload, _ in WORKLOADS if workload.name in CHOSEN}
    columns = ["workload, batch", "s a turn", "with / without sampling (bar 1.01)", "own time, of a core", "µs a sample"]
    title = f"cost of sampling every {interval} s, one GPU, captured steps, {options.repeats} turns"
    bench.print_table(f"{title}; {bench.LEGEND}", columns, [row for row, _ in found.values()])
    record = {"interval": interval, "results": {name: result for name, (_, result) in found.items()}}
    bench.write_record("sampling", record, keep=options.keep, folder="gpu")


if __name__ == "__main__":
    main()
