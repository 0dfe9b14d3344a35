"""One GPU: DeepEx's eager step against a bare PyTorch loop, same network, precision, memory order and batch order.

    python benchmarks/gpu_step.py

Both start from uint8 samples on the device and gather, scale and standardise them there. The bare loop uses fused SGD, gradients
set to None, bf16 autocast, channels-last and cuDNN's search, and counts no errors. Samples are random: this measures speed alone.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import bench
from deepex.comm.solo import SoloCommunicator
from deepex.data.pack import pack
from deepex.engine.config import RunConfig
from deepex.engine.objective import make_objective
from deepex.engine.optim import OptimConfig
from deepex.engine.trainer import Trainer
from deepex.engine.watch import Watcher
from deepex.recipes.job import make_job
from deepex.record import RunDirectory
from deepex.record.clock import NoClock, PhaseClock

WORKLOADS = (
    ("resnet50", (3, 224, 224), 1000, 128, "classify", 1024),
    ("resnet50", (1, 120, 85), 27, 128, "classify", 2560),
    ("cvae", (1, 28, 28), 2, 128, "reconstruct", 5120),
    ("cvae", (1, 28, 28), 2, 1024, "reconstruct", 20480),
)


def make_data(shape: tuple[int, int, int], classes: int, count: int) -> str:
    generator = np.random.default_rng(0)
    folder = Path(tempfile.mkdtemp())
    images = generator.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
    np.savez(folder / "some.npz", images=images, labels=np.arange(count) % classes)
    pack(folder / "some.npz", folder / "packed", classes=[str(k) for k in range(classes)], validation=0.0, layout="NHWC")
    return str(folder / "packed")


def timed(epoch: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        epoch()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return run


def bare_loop(config: RunConfig) -> Callable[[], None]:
    job = make_job(config, SoloCommunicator())
    part, manifest = job.dataset.part("train"), job.dataset.manifest
    images, labels = (torch.from_numpy(a).cuda() for a in part.read(0, part.count))
    network = job.network.cuda().to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=config.optim.rate, momentum=0.9, fused=True)
    objective = make_objective(config.objective)
    mean, deviation = (torch.tensor(v, device="cuda").view(1, -1, 1, 1) for v in (manifest.mean, manifest.deviation))

    def epoch() -> None:
        for batch in torch.randperm(part.count, device="cuda").split(config.batch):
            inputs = images.index_select(0, batch).permute(0, 3, 1, 2).float().div_(255)
            if objective.standardise:
                inputs = inputs.sub_(mean).div_(deviation)
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                output = network(inputs)
            chosen = labels.index_select(0, batch)
            loss = functional.cross_entropy(output, chosen) if objective.standardise else objective.loss(output, inputs, chosen)
            loss.backward()
            optimiser.step()

    return epoch


def deepex_epochs(config: RunConfig, clock: PhaseClock | None) -> tuple[Callable[[], None], Trainer]:
    comm = SoloCommunicator()
    trainer = Trainer(
        make_job(config, comm), comm, RunDirectory.create(Path(tempfile.mkdtemp()) / "run", {}, [], {}), Watcher(), clock=clock
    )
    trainer.load(None)
    learner, state = trainer.learner, {"epoch": 0}

    def epoch() -> None:
        learner.begin_epoch(state["epoch"], 0)
        for start, stop in learner.plan:
            learner.segment(state["epoch"], start, stop, asked_to_stop=lambda: False, stepped=lambda _samples: None)
        state["epoch"] += 1

    return epoch, trainer


def main() -> None:
    options = bench.arguments(__doc__, repeats=10)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    rows, result = [], {}
    for net, shape, classes, batch, objective, count in WORKLOADS:
        config = RunConfig(
            net=net, data=make_data(shape, classes, count), objective=objective, batch=batch, precision="bf16", verify=False,
            validate="none", layout="channels_last", optim=OptimConfig(rate=1e-4),
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        bare = timed(bare_loop(config))
        bare()
        bare_memory = torch.cuda.max_memory_allocated()
        ours, _trainer = deepex_epochs(config, None)
        silent, _ = deepex_epochs(config, NoClock())
        found = bench.in_turns({"bare": bare, "deepex": timed(ours), "no clock": timed(silent)}, options.repeats)
        against, profile = bench.ratio(found["deepex"], found["bare"]), bench.ratio(found["deepex"], found["no clock"])
        name = f"{net} {'×'.join(map(str, shape))} batch {batch}"
        speeds = {who: count / sorted(times)[len(times) // 2] for who, times in found.items()}
        rows.append(
            [name, f"{speeds['bare']:,.0f}", f"{speeds['deepex']:,.0f}", bench.show_ratio(against), bench.show_ratio(profile)]
        )
        result[name] = {"seconds": found, "deepex_over_bare": against, "profile_over_none": profile, "bare_bytes": bare_memory}
        del bare, ours, silent, _trainer
        torch.cuda.empty_cache()
    columns = ["workload (bf16, eager)", "bare img/s", "DeepEx img/s", "time, DeepEx / bare", "time, with / without phase profile"]
    bench.print_table(f"{torch.cuda.get_device_name()}: epochs from samples on the device", columns, rows)
    bench.write_record("gpu_step", {"results": result}, keep=options.keep)


if __name__ == "__main__":
    main()
