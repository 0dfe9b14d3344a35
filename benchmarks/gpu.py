"""One GPU: DeepEx's captured step against what a user would pick instead, end to end from uint8 samples on the device.

    python benchmarks/gpu.py                                   # everything: about 15 minutes, most of it torch.compile's
    python benchmarks/gpu.py --only lenet-128,cvae-128 --peers eager,compile+graph
    python benchmarks/gpu.py --show                            # the table again, from the records

Same network, bf16 with fp32 master weights, shuffled, and random crops and flips for what is classified. All contestants take turns
in one process for each workload (JAX has its own), and whole epochs are timed. Beside the speed stand peak memory, what the phase
profile costs (the same run without it), and the share of one core that the host needs. Samples are random: this measures speed
alone.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

import bench
from deepex.comm.solo import SoloCommunicator
from deepex.data.augment import AugmentConfig
from deepex.engine.config import RunConfig
from deepex.engine.learner import Learner
from deepex.engine.optim import OptimConfig
from deepex.engine.trainer import Trainer
from deepex.engine.watch import Watcher
from deepex.recipes.job import make_job
from deepex.record import RunDirectory
from deepex.record.clock import NoClock, PhaseClock
from peers import PEERS, RATE, Unavailable, Workload, make_peer, measure_jax, peak_bytes

Shape = tuple[int, int, int]
LARGE, SMALL, TINY = (3, 224, 224), (1, 120, 85), (1, 28, 28)
RECORDS = bench.RECORDS / "gpu"


def _workload(net: str, shape: Shape, batch: int, count: int, classes: int = 1000) -> Workload:
    size = {LARGE: "", SMALL: "-120x85", TINY: ""}[shape]
    learns = "reconstruct" if net == "cvae" else "classify"
    return Workload(
        name=f"{net}{size}-{batch}", net=net, shape=shape, classes=classes, batch=batch, objective=learns,
        augment=learns == "classify", count=count,
    )  # fmt: skip


WORKLOADS = [  # with the images/s that we want to reach
    (_workload("resnet50", LARGE, 128, 2048), 7_200),
    (_workload("resnet50", LARGE, 512, 4096), 8_000),
    (_workload("resnet50", SMALL, 128, 7680, 27), 25_000),
    (_workload("resnet50", SMALL, 32, 3840, 27), 12_500),
    (_workload("cvae", TINY, 128, 25600, 2), 100_000),
    (_workload("cvae", TINY, 1024, 40960, 2), 140_000),
    (_workload("lenet", TINY, 128, 128000, 10), None),
    (_workload("vgg16", LARGE, 128, 1280), None),
    (_workload("alexnet", LARGE, 128, 6400), None),
    (_workload("googlenet", LARGE, 128, 3840), None),
]


def deepex_epochs(
    workload: Workload, data: str, clock: PhaseClock | None = None, **changes: Any
) -> tuple[Callable[[], None], Trainer]:
    """Epochs of a run, each a call; the trainer holds what it measures."""
    augment = AugmentConfig(pad=4, flip=True) if workload.augment else AugmentConfig()
    settings = {"step": "captured", "precision": "bf16", "layout": "channels_last", "augment": augment} | changes
    config = RunConfig(
        net=workload.net, data=data, objective=workload.objective, batch=workload.batch, verify=False, validate="none",
        placement="device", optim=OptimConfig(rate=RATE), **settings,
    )  # fmt: skip
    comm = SoloCommunicator()
    run = RunDirectory.create(Path(tempfile.mkdtemp()) / "run", {}, [], {})
    trainer = Trainer(make_job(config, comm), comm, run, Watcher(), clock=clock)
    trainer.load(None)
    learner, state = trainer.learner, {"epoch": 0}

    def epoch() -> None:
        learner.begin_epoch(state["epoch"], 0)
        for start, stop in learner.plan:
            learner.segment(state["epoch"], start, stop, asked_to_stop=lambda: False, stepped=lambda _samples: None)
        state["epoch"] += 1

    return epoch, trainer


def timed(epoch: Callable[[], None]) -> Callable[[], float]:
    """Seconds of an epoch on the device."""

    def run() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        epoch()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return run


def host_share(learner: Learner) -> float:
    """The share of one core that the thread which queues the steps of an epoch needs: the least of three."""
    shares = []
    for number in range(1000, 1003):
        learner.begin_epoch(number, 0)
        torch.cuda.synchronize()
        began, busy = perf_counter(), thread_time()
        for start, stop in learner.plan:
            learner.segment(number, start, stop, asked_to_stop=lambda: False, stepped=lambda _samples: None)
        busy = thread_time() - busy
        torch.cuda.synchronize()
        shares.append(busy / (perf_counter() - began))
    return min(shares)


def measure(workload: Workload, peers: list[str], repeats: int, *, keep: bool) -> None:
    """All contestants on one workload, in turns; writes its record."""
    from deepex import nets

    images, labels, data = bench.random_data(workload.shape, workload.classes, workload.count)
    on_device = torch.from_numpy(images).cuda(), torch.from_numpy(labels).cuda()
    channels, *size = workload.shape
    network: nn.Module = nets.build(workload.net, channels=channels, size=tuple(size), classes=workload.classes)
    epochs: dict[str, Callable[[], float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in (peer for peer in peers if peer != "jax"):
        before = _held()
        try:
            peer = make_peer(name, workload, *on_device, network)
        except Unavailable as reason:
            facts[name] = {"unavailable": str(reason)}
            continue
        peer.epoch()
        epochs[name] = timed(peer.epoch)
        facts[name] = {"setup_seconds": peer.setup_seconds, "peak_bytes": peak_bytes() - before, "loss": peer.loss()}
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for name, clock in (("deepex", None), ("deepex without profile", NoClock())):
        before = _held()
        began = perf_counter()
        epoch, trainer = deepex_epochs(workload, data, clock)
        setup = perf_counter() - began
        epoch()
        epochs[name] = timed(epoch)
        runner = trainer.learner.runner
        facts[name] = {"setup_seconds": setup, "peak_bytes": peak_bytes() - before, "fusions": runner.choice.fusions}
        facts[name] |= {"loss": float(runner.sums[0]) / workload.count, "host_share": host_share(trainer.learner)}
    found = bench.in_turns(epochs, repeats)
    ours = found["deepex"]
    results: dict[str, Any] = {
        name: {"images_per_second": [workload.count / s for s in seconds], **facts[name]} for name, seconds in found.items()
    }
    results |= {name: fact for name, fact in facts.items() if name not in results}
    if "jax" in peers:
        epochs.clear()
        results["jax"] = _jax(workload, repeats)
    profile = bench.ratio(ours, found["deepex without profile"])
    record = {"workload": vars(workload), "results": results, "profile_over_none": profile}
    bench.write_record(workload.name, record, keep=keep, folder="gpu")


def _held() -> int:
    """What other contestants hold of the device's memory; a new count of the peak begins."""
    gc.collect()
    torch.cuda.empty_cache()
    peak_bytes()
    return torch.cuda.memory_allocated()


def _jax(workload: Workload, repeats: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    try:
        found = measure_jax(workload, repeats)
    except (Unavailable, RuntimeError, subprocess.TimeoutExpired) as reason:
        return {"unavailable": str(reason)[-500:]}
    speeds = found.pop("images_per_second")
    return {"images_per_second": speeds if isinstance(speeds, list) else [speeds], **found}


def show(folder: Path) -> None:
    """The table, from the records there are."""
    rows = []
    for workload, bar in WORKLOADS:
        path = folder / f"{workload.name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        results = record["results"]
        speeds = {name: result["images_per_second"] for name, result in results.items() if "images_per_second" in result}
        ours = statistics.median(speeds["deepex"])
        others = {name: statistics.median(speeds[name]) for name in PEERS if name in speeds}
        best = max(others, key=others.__getitem__) if others else None
        memory = results["deepex"]["peak_bytes"] / 1e9
        rows.append([
            workload.name, *(f"{others[name]:,.0f}" if name in others else "-" for name in PEERS),
            f"{ours:,.0f} ({min(speeds['deepex']):,.0f}-{max(speeds['deepex']):,.0f})",
            "-" if best is None else f"{ours / others[best]:.2f} × {best}", "-" if bar is None else f"{bar:,}",
            f"{memory:.2f}" + ("" if best is None else f" / {results[best]['peak_bytes'] / 1e9:.2f}"),
            f"{100 * (record['profile_over_none']['ratio'] - 1):+.2f} %", f"{100 * results['deepex']['host_share']:.1f} %",
        ])  # fmt: skip
    columns = ["workload, batch", *PEERS, "DeepEx (least-most)", "over the best", "goal", "GB, ours / best's", "profile", "host"]
    bench.print_table("images/s of training on one GPU, bf16", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload, _ in WORKLOADS]
    parser.add_argument("--only", default=",".join(names), help="workloads, with commas between")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each contestant")
    parser.add_argument("--keep", action="store_true", help="write the records into benchmarks/records")
    parser.add_argument("--show", action="store_true", help="only print the table of the records that there are")
    parser.add_argument("--here", action="store_true", help="in this process; else each workload has its own")
    options = parser.parse_args()
    chosen = options.only.split(",")
    for workload, _ in WORKLOADS if not options.show else []:
        if workload.name not in chosen:
            continue
        if options.here:
            measure(workload, [name for name in options.peers.split(",") if name], options.repeats, keep=options.keep)
        else:
            words = [sys.executable, __file__, "--here", "--only", workload.name, "--peers", options.peers]
            subprocess.run([*words, "--repeats", str(options.repeats), *["--keep"] * options.keep], check=False)
    if not options.here:
        show(RECORDS if options.keep or options.show else Path("runs") / "benchmarks" / "gpu")


if __name__ == "__main__":
    main()
