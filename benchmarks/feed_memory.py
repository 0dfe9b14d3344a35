"""How much memory the samples take: bytes in memory per byte of the shard, for each placement, on one rank and on two.

    python benchmarks/feed_memory.py

A linear network trains for two epochs on 3×64×64 images, once on 671 MB of them and once on 1,342 MB, in processes of their own.
A thread adds up the anonymous and the shared memory of the process every 10 ms (Pss in /proc/self/smaps_rollup: memory that ranks
share counts once; pages of files, which the system can drop, do not count). What the peak grows by from the smaller to the larger
dataset, over what the images grow by, is what a byte of the shard costs; the aim is at most 1.1 for `host`. `stream` holds two
windows of 268 MB for each rank, whatever the size.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepex.comm.early import load_mpi

load_mpi()

from torch import nn

import bench
from deepex.comm import Communicator
from deepex.comm.launch import launcher_prefix
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.recipes.network import build_network
from deepex.record.clock import NoClock
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from feeds import PLACEMENTS

SHAPE, CLASSES = (3, 64, 64), 10
SIZES = (640 << 20, 1280 << 20)
MB = 1e6


def linear(channels: int, size: tuple[int, int], classes: int) -> nn.Module:
    """As little computing as a network can have."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))


def in_memory() -> int:
    """Bytes of this process that no file backs, its part of what is shared."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@contextmanager
def watched(found: dict[str, int]) -> Any:
    """Note the most memory that is held at any time."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found["peak"] = max(found["peak"], in_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    done.set()
    thread.join()
    found["peak"] = max(found["peak"], in_memory())


def train(data: str, placement: str, comm: Communicator) -> int:
    """Two epochs; the peaks of all ranks together, on rank 0."""
    settings: dict[str, Any] = {"placement": placement, "verify": False, "validate": "none", "layout": "contiguous"}
    config = RunConfig(net="feed_memory:linear", data=data, batch=64, threads=1, **settings)
    found = {"peak": in_memory()}
    with watched(found):
        parts = build(make_job(config, comm, build_network), comm, clock=NoClock())
        epoch = bench.epochs(Learner(parts))
        epoch(), epoch()
        parts.close()
    return sum(comm.gather(found["peak"]))


def run_case(data: str, placement: str, ranks: int) -> int:
    prefix, extra = launcher_prefix(ranks) if ranks > 1 else ([], {})
    command = [*prefix, sys.executable, __file__, "--case", data, placement, str(ranks)]
    done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{placement} on {ranks} rank(s) failed:\n{done.stdout}{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    options = bench.arguments("memory of the samples", repeats=2)
    data = [bench.random_data(SHAPE, CLASSES, size // (SHAPE[0] * SHAPE[1] * SHAPE[2]))[2] for size in SIZES]
    rows, result = [], {}
    try:
        for ranks in (1, 2):
            for placement in PLACEMENTS:
                peaks = [[run_case(one, placement, ranks) for one in data] for _ in range(options.repeats)]
                cost = [(large - small) / (SIZES[1] - SIZES[0]) for small, large in peaks]
                result[f"{placement}, {ranks} rank(s)"] = {"peak_bytes": peaks, "per_byte": cost}
                shown = [f"{min(peak[k] for peak in peaks) / MB:.0f}" for k in range(2)]
                rows.append([placement, ranks, *shown, ", ".join(f"{value:.3f}" for value in cost)])
    finally:
        for one in data:
            shutil.rmtree(Path(one).parent)
    columns = ["placement", "ranks", *(f"peak for {size / MB:.0f} MB, MB" for size in SIZES), "bytes per byte of shard (bar 1.1)"]
    bench.print_table("memory of the samples", columns, rows)
    bench.write_record("feed_memory", {"results": result, "sizes": SIZES}, keep=options.keep)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        bench.settle(1)
        communicator = MpiCommunicator() if int(sys.argv[4]) > 1 else SoloCommunicator()
        answer = train(sys.argv[2], sys.argv[3], communicator)
        if communicator.rank == 0:
            print(json.dumps(answer))
    else:
        main()
