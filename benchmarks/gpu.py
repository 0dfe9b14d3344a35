"""One GPU: DeepEx's captured step against what a user would pick instead, end to end from uint8 samples on the device.

    python benchmarks/gpu.py                                   # everything: about half an hour, most of it compilation
    python benchmarks/gpu.py --only lenet-128,cvae-128 --peers eager,compile+graph
    python benchmarks/gpu.py --show                            # the table again, from the records

Same network, bf16 with fp32 master weights, shuffled, and random crops and flips for what is classified. All contestants take turns
in one process for each workload (JAX has its own), and whole epochs are timed. Beside the speed stand peak memory (samples
included), what the phase profile costs (the same run without it), and the share of one core that the host needs. Samples are
random: this measures speed alone. `--keep` writes a record for each workload, with its log, and the table, into
benchmarks/records/gpu.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

import bench
from deepex.arena.optimiser.config import OptimConfig
from deepex.comm.solo import SoloCommunicator
from deepex.data.augment import AugmentConfig
from deepex.machine.reading import attempt
from deepex.recipes.network import build_network
from deepex.record.clock import NoClock, PhaseClock
from deepex.step.captured.runner import CapturedRunner
from deepex.training.build import build
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from deepex.training.session import run_stretch
from peers import PEERS, RATE, Unavailable, Workload, make_peer, measure_jax, peak_bytes

if TYPE_CHECKING:
    from peers.base import Peer

Shape = tuple[int, int, int]
LARGE, SMALL, TINY = (3, 224, 224), (1, 120, 85), (1, 28, 28)
RECORDS = bench.RECORDS / "gpu"
PROFILE_TURNS = 12  # a difference of half a percent needs more turns than one between contestants


def _workload(net: str, shape: Shape, batch: int, count: int, classes: int = 1000) -> Workload:
    size = {LARGE: "", SMALL: "-120x85", TINY: ""}[shape]
    learns = "reconstruct" if net == "cvae" else "classify"
    return Workload(
        name=f"{net}{size}-{batch}", net=net, shape=shape, classes=classes, batch=batch, task=learns,
        augment=learns == "classify", count=count,
    )  # fmt: skip


WORKLOADS = [  # with the images/s that we want to reach
    (_workload("resnet50", LARGE, 128, 2048), 7_200),
    (_workload("resnet50", LARGE, 512, 4096), 8_000),
    (_workload("resnet50", SMALL, 128, 7680, 27), 25_000),
    (_workload("resnet50", SMALL, 32, 2560, 27), 12_500),
    (_workload("cvae", TINY, 128, 25600, 2), 100_000),
    (_workload("cvae", TINY, 1024, 40960, 2), 140_000),
    (_workload("lenet", TINY, 128, 64000, 10), None),
    (_workload("vgg16", LARGE, 128, 1280), None),
    (_workload("alexnet", LARGE, 128, 6400), None),
    (_workload("googlenet", LARGE, 128, 3840), None),
]


def deepex_epochs(
    workload: Workload, data: str, clock: PhaseClock | None = None, **changes: Any
) -> tuple[Callable[[], None], Learner]:
    """Epochs of a run, each a call; the learner's parts hold what it measures."""
    augment = AugmentConfig(pad=4, flip=True) if workload.augment else AugmentConfig()
    settings = {"step": "captured", "precision": "bf16", "layout": "channels_last", "augment": augment} | changes
    config = RunConfig(
        net=workload.net, data=data, task=workload.task, batch=workload.batch, verify=False, validate="none",
        placement="device", optim=OptimConfig(rate=RATE), **settings,
    )  # fmt: skip
    comm = SoloCommunicator()
    learner = Learner(build(make_job(config, comm, build_network), comm, clock=clock))
    numbers = itertools.count()
    return lambda: bench.run_epoch(learner, next(numbers)), learner


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


def host_shares(learner: Learner) -> dict[str, float]:
    """The share of one core that the thread which queues the steps of an epoch needs: the least of three.

    `driver_share` of it is the driver's, for launching graphs; the rest is Python's, and what waiting takes.
    """
    shares = []
    runner = cast("CapturedRunner", learner.parts.runner)
    for number in range(1000, 1003):
        learner.begin_epoch(number, 0)
        torch.cuda.synchronize()
        with _timed_launches(runner) as launches:
            began, busy = perf_counter(), thread_time()
            for stretch in learner.stretches():
                run_stretch(learner, stretch)
            busy = thread_time() - busy
            torch.cuda.synchronize()
            seconds = perf_counter() - began
        shares.append((busy / seconds, sum(launches) / seconds))
    host, driver = min(shares)
    return {"host_share": host, "driver_share": driver}


@contextmanager
def _timed_launches(runner: CapturedRunner) -> Iterator[list[float]]:
    """The thread's seconds of every launch of a graph within."""
    seconds: list[float] = []
    kept = [(lap, lap.run) for lap in runner.laps]

    def told(run: Callable[[], None]) -> Callable[[], None]:
        def launch() -> None:
            began = thread_time()
            run()
            seconds.append(thread_time() - began)

        return launch

    for lap, run in kept:
        lap.run = told(run)
    try:
        yield seconds
    finally:
        for lap, run in kept:
            lap.run = run


class Log:
    """Says what happens, and keeps it for the record."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._began = perf_counter()

    def __call__(self, text: str) -> None:
        """Say it, with the seconds since the start."""
        self.lines.append(f"{perf_counter() - self._began:7.1f} s  {text}")
        print(self.lines[-1], flush=True)

    def told(self, name: str, contestant: Callable[[], float]) -> Callable[[], float]:
        """A contestant whose times are said."""

        def run() -> float:
            seconds = contestant()
            self(f"{name}: {seconds:.4f} s")
            return seconds

        return run


def measure(workload: Workload, peers: list[str], repeats: int, *, keep: bool) -> None:
    """All contestants on one workload, in turns; writes its record."""
    torch.backends.cudnn.benchmark = True  # as in a run; the peers want it, too
    log = Log()
    log(f"== {workload.name}")
    images, labels, data = bench.random_data(workload.shape, workload.classes, workload.count)
    epochs: dict[str, Callable[[], float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    on_device = torch.from_numpy(images).cuda(), torch.from_numpy(labels).cuda()
    samples = sum(tensor.nbytes for tensor in on_device)  # part of everyone's memory: DeepEx and JAX have samples of their own
    before = _held()
    for name, made in make_peers(workload, peers, *on_device):
        if isinstance(made, Unavailable):
            facts[name] = {"unavailable": str(made)}
            log(str(made))
        else:
            made.epoch()
            epochs[name] = timed(made.epoch)
            peak = peak_bytes() - before + samples
            facts[name] = {"setup_seconds": made.setup_seconds, "peak_bytes": peak, "loss": made.loss()}
            log(f"{name} is ready: {made.setup_seconds:.1f} s, {peak / 1e9:.2f} GB, loss {made.loss():.3f}")
        before = _held()
    # The first to need a convolution lets cuDNN try its ways, with memory that it does not need later. So eager is the first of the
    # peers, and the run without a profile, which is not in the table, the first of ours.
    for name, clock in (("deepex without profile", NoClock()), ("deepex", None)):
        before = _held()
        began = perf_counter()
        epoch, learner = deepex_epochs(workload, data, clock)
        setup = perf_counter() - began
        epoch()
        epochs[name] = timed(epoch)
        runner = learner.parts.runner
        facts[name] = {"setup_seconds": setup, "peak_bytes": peak_bytes() - before, "choice": vars(runner.choice)}
        facts[name] |= {"loss": float(runner.sums[0]) / workload.count, **host_shares(learner)}
        loss, memory = facts[name]["loss"], facts[name]["peak_bytes"] / 1e9
        log(f"{name} is ready: {setup:.1f} s, {memory:.2f} GB, loss {loss:.3f}; {runner.choice.reason}; {runner.choice.fusions}")
    epochs = {name: log.told(name, epoch) for name, epoch in epochs.items()}
    found = bench.in_turns(epochs, repeats, warm_ups=1)
    ours = ["deepex", "deepex without profile"]
    profile = bench.in_turns({name: epochs[name] for name in ours}, PROFILE_TURNS, warm_ups=1)
    results: dict[str, Any] = {
        name: {"images_per_second": [workload.count / s for s in seconds], **facts[name]} for name, seconds in found.items()
    }
    results |= {name: fact for name, fact in facts.items() if name not in results}
    if "jax" in peers:
        epochs.clear()
        results["jax"] = _jax(workload, repeats)
        log(f"jax: {results['jax']}")
    record = {
        "workload": vars(workload), "results": results, "profile_over_none": bench.ratio(*(profile[name] for name in ours)),
        "peer_versions": {name: attempt(partial(metadata.version, name)) for name in ("lightning", "timm", "jax", "flax")},
        "log": log.lines,
    }  # fmt: skip
    bench.write_record(workload.name, record, keep=keep, folder="gpu")


def make_peers(
    workload: Workload, peers: list[str], images: torch.Tensor, labels: torch.Tensor
) -> Iterator[tuple[str, "Peer | Unavailable"]]:
    """The peers of this process, one after the other, each ready to run."""
    from deepex import nets

    channels, *size = workload.shape
    network: nn.Module = nets.build(workload.net, channels=channels, size=tuple(size), classes=workload.classes)
    for name in (peer for peer in peers if peer != "jax"):
        try:
            yield name, make_peer(name, workload, images, labels, network)
        except Unavailable as reason:
            yield name, reason


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
    speeds = [found["num_samples"] / seconds for seconds in found["seconds"]]
    return found | {"images_per_second": speeds}


def show(folder: Path, *, keep: bool) -> None:
    """The table, from the records there are; `keep` writes it beside them."""
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
            f"{100 * (record['profile_over_none']['ratio'] - 1):+.2f} %", _host(results["deepex"]),
        ])  # fmt: skip
    columns = [
        "workload, batch",
        *PEERS,
        "DeepEx (least-most)",
        "over the best",
        "goal",
        "GB, ours / best's",
        "profile",
        "host: Python + driver",
    ]
    table = bench.format_table("images/s of training on one GPU, bf16", columns, rows)
    print(table)
    if keep:
        (folder / "table.md").write_text(table.lstrip() + "\n", encoding="utf-8")


def _host(result: dict[str, Any]) -> str:
    """Python's share of a core, and the driver's."""
    driver = result.get("driver_share", 0.0)
    return f"{100 * (result['host_share'] - driver):.1f} + {100 * driver:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload, _ in WORKLOADS]
    parser.add_argument("--only", default=",".join(names), help="workloads, with commas between")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each contestant")
    parser.add_argument("--keep", action="store_true", help="write the records and the table into benchmarks/records")
    parser.add_argument("--show", action="store_true", help="only print the table of the records that there are")
    parser.add_argument("--here", action="store_true", help="in this process; else each workload has its own")
    options = parser.parse_args()
    peers, only = ([name for name in words.split(",") if name] for words in (options.peers, options.only))
    if unknown := [*set(only).difference(names), *set(peers).difference(PEERS)]:
        parser.error(f"there is no {', no '.join(unknown)}; workloads: {', '.join(names)}; peers: {', '.join(PEERS)}")
    if not options.show:
        bench.need_gpu("; --show prints the table of the records")
    failed = []
    for workload in [workload for workload, _ in WORKLOADS if workload.name in only and not options.show]:
        if options.here:
            measure(workload, peers, options.repeats, keep=options.keep)
        else:
            words = [sys.executable, __file__, "--here", "--only", workload.name, "--peers", options.peers]
            done = subprocess.run([*words, "--repeats", str(options.repeats), *["--keep"] * options.keep], check=False)
            failed += [workload.name] if done.returncode else []
    if not options.here:
        show(RECORDS if options.keep or options.show else Path("runs") / "benchmarks" / "gpu", keep=options.keep)
    if failed:
        sys.exit(f"not measured, see above: {', '.join(failed)}; what the table has of them is from an earlier run")


if __name__ == "__main__":
    main()
