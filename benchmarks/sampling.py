"""What sampling a run's resources costs of an epoch.

    python benchmarks/sampling.py

One rank, its epochs with and without a sampler beside them, in turns in one process. Starting the thread is not timed, for a run
does that once; reading what an epoch used, and writing the series, are. A ratio of times carries the machine's noise. So the time
of the sampling itself is measured too, as seconds of a core (`thread_time`), which others on the machine hardly disturb: that of
the sampler's thread, per second of the epoch; and per second that the training thread had a core, what it reads and writes at the
end of an epoch, and what reading the processor's time at every mark of the phase clock adds.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import NamedTuple

import torch

import bench
import deepex
from deepex.machine.sampling import Sampler, Series, open_sources
from deepex.record.clock import HostClock, PhaseClock
from deepex.training.config import RunConfig
from one_rank import deepex_epochs, marks_per_epoch, small_data

WORKLOADS = {"lenet": 1280, "resnet18": 64}


class Cost(NamedTuple):
    """Seconds of a core in one epoch: the sampler's, the training thread's for sampling and for training; and how many samples."""

    sampler_seconds: float
    trainer_seconds: float
    training_seconds: float
    num_samples: int


def sampled(
    epoch: Callable[[], float], clock: PhaseClock, interval_seconds: float, costs: list[Cost], gpu: str | None = None
) -> Callable[[], float]:
    """The same epochs with a sampler, as the first rank of a node has it; what each costs goes to `costs`."""
    folder = Path(tempfile.mkdtemp())

    def both() -> float:
        series = Series(folder / f"{len(costs)}.jsonl", interval_seconds)
        with Sampler(interval_seconds, open_sources(first=True, gpu=gpu), clock.progress, series) as sampler:
            began = perf_counter()
            own = [thread_time()]
            sampler.pause()
            own.append(thread_time())
            epoch()
            own.append(thread_time())
            sampler.take()
            sampler.write()
            own.append(thread_time())
            pause, training, end = (after - before for before, after in itertools.pairwise(own))
            costs.append(Cost(sampler.own_seconds, pause + end, training, sampler.num_samples - 2))
            return perf_counter() - began

    return both


def process_time_seconds(calls: int = 200_000) -> float:
    """The time of one reading of the processor's time, which each mark makes."""
    began = thread_time()
    for _ in range(calls):
        process_time()
    return (thread_time() - began) / calls


def main() -> None:
    options = bench.arguments(__doc__, repeats=40, threads=1)
    bench.settle(options.threads)
    interval = RunConfig(net="", data="").sampling
    rows, result = [], {}
    for net, samples in WORKLOADS.items():
        torch.manual_seed(0)
        keys = {"net": net, "batch": 32, "threads": options.threads, "data": small_data(samples), "device": "cpu"}
        config = deepex.recipe("fashion", keys)
        plain, _ = deepex_epochs(config, HostClock())
        clock, costs = HostClock(), list[Cost]()
        beside = sampled(deepex_epochs(config, clock)[0], clock, interval, costs)
        found = bench.in_turns({"sampled": beside, "not sampled": plain}, options.repeats)
        costs = costs[-options.repeats :]
        against = bench.ratio(found["sampled"], found["not sampled"])
        total = Cost(*(sum(column) for column in zip(*costs, strict=True)))
        marks = process_time_seconds() * marks_per_epoch(samples, config.batch) * options.repeats
        shares = {
            "sampler": total.sampler_seconds / sum(found["sampled"]),
            "trainer": total.trainer_seconds / total.training_seconds,
            "marks": marks / total.training_seconds,
        }
        own, each = sum(shares.values()), total.sampler_seconds / max(1, total.num_samples)
        parts = " + ".join(f"{share:.3%}" for share in shares.values())
        seconds = f"{statistics.median(found['sampled']):.2f}"
        rows.append([net, samples, seconds, bench.show_ratio(against), parts, f"{own:.3%}", f"{each * 1e6:.0f}"])
        result[net] = {
            "seconds": found,
            "sampled_over_not": against,
            "own_shares": shares,
            "own_share": own,
            "sample_seconds": each,
        }
    columns = [
        "network",
        "images",
        "s an epoch",
        "with / without sampling",
        "own time of sampler + end of epoch + marks",
        "all of them (bar 1 %)",
        "µs a sample",
    ]
    title = f"cost of sampling every {interval} s, one rank, {options.threads} thread(s), batch 32, {options.repeats} turns"
    bench.print_table(f"{title}; {bench.LEGEND}", columns, rows)
    bench.write_record("sampling", {"threads": options.threads, "interval": interval, "results": result}, keep=options.keep)


if __name__ == "__main__":
    main()
