"""Join what a configuration names: dataset, network, device, placement."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from deepex.comm import Communicator
from deepex.data.dataset import PackedDataset
from deepex.data.placement import choose_placement
from deepex.data.shard import Shards
from deepex.engine.config import RunConfig
from deepex.engine.job import Job
from deepex.engine.layout import choose_layout
from deepex.engine.objective import make_objective
from deepex.errors import ConfigError, DataError, UnknownName
from deepex.machine.hardware import describe_memory
from deepex.machine.heap import give_back_heap
from deepex.recipes.network import build_network

SAMPLES = Path(__file__).parent / "samples"


def make_job(config: RunConfig, comm: Communicator) -> Job:
    """Open, build and check everything that a mistake in the configuration could spoil, before anything is trained."""
    replicas = config.replicas_on(comm.size)
    dataset = PackedDataset.open(find_data(config.data))
    if config.objective == "classify" and not dataset.manifest.classes:
        raise DataError(f"{dataset.directory} has no labels, so nothing can be classified: set objective=reconstruct")
    shards = Shards(dataset.part("train").count, replicas, config.batch)
    device = pick_device(config.device, comm.place.local_rank)
    per_rank = replicas // comm.size
    samples_bytes = per_rank * shards.size(0) * dataset.manifest.sample_bytes
    free_host = (describe_memory()["available_bytes"] or 0) // comm.place.local_size
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host
    placement = choose_placement(
        config.placement,
        samples_bytes=samples_bytes,
        device=device.type,
        free_device_bytes=free_device,
        free_host_bytes=free_host,
    )
    return Job(
        config=config,
        network=build_network(config, dataset.manifest),
        dataset=dataset,
        device=device,
        placement=placement,
        replicas=replicas,
        channels_last=config.layout == "channels_last",
    )


def decide_layout(job: Job, comm: Communicator) -> tuple[Job, str]:
    """Settle `layout = auto`: rank 0 tries, all follow, because a sync needs the same layout on every rank. Collective."""
    config = job.config
    if config.layout != "auto":
        return job, "asked for"
    found = None
    if comm.rank == 0 and not config.deterministic:
        shape, objective = job.dataset.manifest.shape, make_objective(config.objective)
        found = choose_layout(job.network, shape=shape, batch=config.batch, objective=objective, device=job.device)
        give_back_heap()  # else the run would carry what the trial took
    fixed = (False, "fixed, because deterministic")
    channels_last, reason = comm.gather(fixed if found is None else (found.channels_last, found.reason))[0]
    settled = dataclasses.replace(config, layout="channels_last" if channels_last else "contiguous")
    return dataclasses.replace(job, config=settled, channels_last=channels_last), reason


def find_data(data: str) -> Path:
    """Find the directory of a dataset; `sample:NAME` is one that comes with DeepEx."""
    kind, colon, name = data.partition(":")
    if not (colon and kind == "sample"):
        return Path(data)
    names = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
    if name not in names:
        raise UnknownName("sample dataset", name, names)
    return SAMPLES / name


def pick_device(asked: str, local_rank: int) -> torch.device:
    """Pick the accelerator of a rank: its own where there are enough, a shared one where there are not."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU: check the driver with `deepex doctor`, or set device=cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choices(job: Job, comm: Communicator, *, comm_reason: str, layout_reason: str, threads: int) -> dict[str, Any]:
    """What was chosen for a run, and why: the facts of run.json that the configuration does not hold."""
    parameters = sum(parameter.numel() for parameter in job.network.parameters())
    return {
        "ranks": comm.size,
        "nodes": comm.place.num_nodes,
        "replicas": job.replicas,
        "comm": {"kind": comm.kind, "reason": comm_reason},
        "device": str(job.device.type),
        "threads": threads,
        "placement": {"kind": job.placement.kind, "reason": job.placement.reason},
        "layout": {"kind": job.config.layout, "reason": layout_reason},
        "step": {"kind": "eager", "reason": "PyTorch's operators one by one"},
        "network": {"name": job.config.net, "parameters": parameters},
        "samples": {name: part.count for name, part in job.dataset.manifest.parts.items()},
    }
