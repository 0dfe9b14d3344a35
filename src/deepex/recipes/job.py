"""Join what a configuration names: dataset, network, device, placement."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepex.comm import Communicator
from deepex.comm.same import gather_same
from deepex.data.dataset import PackedDataset
from deepex.data.direct import Hdf5Config, Hdf5Dataset, find_hdf5
from deepex.data.feeds.placement import Placement, choose_placement, most_modest
from deepex.data.feeds.shard import Shards
from deepex.errors import ConfigError, DataError, UnknownName
from deepex.machine.hardware import describe_memory
from deepex.machine.heap import give_back_heap
from deepex.recipes.network import build_network
from deepex.recipes.same import settled
from deepex.record.table import from_table
from deepex.record.target import Target
from deepex.step.choose import check_settings
from deepex.step.cost import activation_bytes, forward_flops, takes_one
from deepex.step.image_order import choose_order
from deepex.sync.how.auto import settled as settled_sync
from deepex.sync.how.strategy import slices_of_each
from deepex.sync.outer.muon import muon_flops
from deepex.task import TASKS, make_task, task_kind
from deepex.training.config import RunConfig
from deepex.training.job import Job, OpenDataset, split
from deepex.training.trial import check_network

SAMPLES = Path(__file__).parent / "samples"


def make_job(config: RunConfig, comm: Communicator, *, ranks_on_device: int = 1) -> Job:
    """Open, build and check everything that a mistake in the configuration could spoil, before anything is trained.

    `ranks_on_device`: how many ranks use this one's GPU.
    """
    replicas = config.replicas_on(comm.size)
    config.sync.kind.check_replicas(config.sync, replicas=replicas, per_rank=replicas // comm.size)
    dataset = open_dataset(config)
    if task_kind(config.task).needs_labels and not dataset.manifest.classes:
        others = " or ".join(name for name, kind in TASKS.items() if not kind.needs_labels)
        raise DataError(f"{dataset.directory} has no labels, which the task {config.task} needs: set task={others}")
    if config.target is not None and Target.parse(str(config.target)).part not in dataset.manifest.parts:
        raise ConfigError(f"target is {config.target!r}, but {dataset.directory} has no validation part: set a target of train")
    shards = split(config, dataset, replicas)
    device = pick_device(config.device, comm.place.local_rank)
    check_settings(config.step, device)
    network = build_network(config, dataset.manifest)
    _check_last_batch(config, network, dataset, shards)
    kept, moving = _tried(config, network, dataset, shards, ranks=comm.size)
    config, sync_reason = _settle_sync(config, network, dataset, shards, per_rank=replicas // comm.size)
    return Job(
        config=config,
        network=network,
        dataset=dataset,
        device=device,
        placement=_place(config, dataset, network, kept, device=device, shards=shards, comm=comm, sharing=ranks_on_device),
        replicas=replicas,
        channels_last=config.layout == "channels_last",
        sync_reason=sync_reason,
        moving=moving,
    )


def _tried(
    config: RunConfig, network: nn.Module, dataset: OpenDataset, shards: Shards, *, ranks: int
) -> tuple[int | None, frozenset[str]]:
    """What a step keeps between its passes, and the frozen tensors that the network itself changes.

    A network of somebody's own is tried for it; ours are known to train, and to leave what is frozen alone.
    """
    if ":" in config.net:
        trial = check_network(network, config, dataset, shards, ranks=ranks)
        return trial.activation_bytes(config.batch), trial.moving
    channels, height, width = dataset.manifest.shape
    return activation_bytes(network, (channels, *config.augment.size(height, width)), config.batch), frozenset()


def _settle_sync(
    config: RunConfig, network: nn.Module, dataset: OpenDataset, shards: Shards, *, per_rank: int
) -> tuple[RunConfig, str]:
    """Settle `sync = auto`, on every rank alike."""

    def outer_steps() -> float:
        """By operations: on an H200 as many take a third to ten times as long as those of a step, the longer the larger a batch."""
        channels, height, width = dataset.manifest.shape
        step = 3 * config.batch * forward_flops(network, (channels, *config.augment.size(height, width)))
        outer = muon_flops(parameter.shape for parameter in network.parameters())
        return outer / (step * per_rank) if step else math.inf

    sync, reason = settled_sync(config.sync, replicas=shards.replicas, steps=shards.steps, outer_steps=outer_steps)
    return dataclasses.replace(config, sync=sync), reason


def _check_last_batch(config: RunConfig, network: nn.Module, dataset: OpenDataset, shards: Shards) -> None:
    """A last batch of one sample is too few for some networks, which would be told at the end of an epoch only."""

    def leaves_one(batch: int) -> bool:
        return any(shards.size(replica) % batch == (batch > 1) for replica in (0, shards.replicas - 1))

    channels, height, width = dataset.manifest.shape
    if not leaves_one(config.batch) or takes_one(network, (channels, *config.augment.size(height, width))):
        return
    near = sorted(range(2, shards.size(shards.replicas - 1) + 1), key=lambda batch: abs(batch - config.batch))
    better = next((f"set batch={batch}" for batch in near if not leaves_one(batch)), "use fewer replicas")
    raise ConfigError(
        f"batch {config.batch} leaves a last batch of 1 sample, of which batch norm in this network can make nothing (replicas "
        f"have {shards.size(0)} samples each, or one less): {better}"
    )


def _place(
    config: RunConfig,
    dataset: OpenDataset,
    network: nn.Module,
    activation: int | None,
    *,
    device: torch.device,
    shards: Shards,
    comm: Communicator,
    sharing: int,
) -> Placement:
    """Choose the placement that this rank has memory for."""
    per_rank, sample_bytes = shards.replicas // comm.size, dataset.manifest.sample_bytes + 8  # and the label
    validation = dataset.manifest.parts.get("validation")
    if config.validate == "none" or validation is None:
        validated = 0
    else:
        validated = -(-validation.count // comm.size) if config.validate == "parallel" else validation.count
    free_host = (describe_memory()["available_bytes"] or 0) // comm.place.local_size
    on_gpu = device.type == "cuda"
    weights = sum(parameter.nbytes for parameter in network.parameters())
    return choose_placement(
        config.placement,
        samples_bytes=(per_rank * shards.size(0) + validated) * sample_bytes,
        arena_bytes=_arena_slices(config, per_rank, on_gpu=on_gpu) * weights,
        activation_bytes=activation,
        device=device.type,
        free_device_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else free_host,
        free_host_bytes=free_host,
        ranks_on_device=sharing if on_gpu else 1,
        through_host=on_gpu and dataset.manifest.order == "given",
        replicas_per_rank=per_rank,
    )


def _arena_slices(config: RunConfig, per_rank: int, *, on_gpu: bool) -> int:
    """How many times the weights a rank holds.

    With gradients and momentum; on a GPU also the gradients that a captured step makes (in bf16 of half the size, and as much for
    the weights' twin where gradients are gathered); for several replicas also what they last agreed and their sum (of 8 bytes where
    deterministic), and momenta of their own, which wait in host memory; for outer momentum what it steps from, and its velocity;
    and with a strategy that lets replicas differ, or codes what they send, a slice for each of them.
    """
    sync, agreed = config.sync, 2 if config.sync.momentum == "average" else 1
    slices = (4 if on_gpu else 3) + 2 * (sync.outer != "none")
    if sync.wire != "fp32":
        return slices + slices_of_each(per_rank) * agreed
    waiting = per_rank if per_rank > 1 and sync.momentum == "local" and not on_gpu else 0
    return slices + sync.kind.slices(sync, per_rank=per_rank, deterministic=config.deterministic) * agreed + waiting


def agree_on_placement(job: Job, comm: Communicator, *, checkpoint: str | None = None) -> Job:
    """Take the placement that every rank has memory for, because ranks of a node read for each other. Collective.

    What else has been settled must be the same on all ranks, also the name of the `checkpoint` to go on from.
    """
    told = gather_same(comm, settled(job, checkpoint), dataclasses.asdict(job.placement))
    chosen = most_modest([Placement(**table) for table in told])
    return dataclasses.replace(job, placement=chosen)


def decide_layout(job: Job, comm: Communicator) -> tuple[Job, str]:
    """Settle `layout = auto`: rank 0 tries, all follow, because a sync needs the same layout on every rank. Collective."""
    config = job.config
    if config.layout != "auto":
        return job, "asked for"
    found = None
    if comm.rank == 0 and not config.deterministic:
        task = make_task(config.task)
        found = choose_order(job.network, shape=job.input_shape, batch=config.batch, task=task, device=job.device)
        give_back_heap()  # else the run would carry what the trial took
    fixed = (False, "fixed, because deterministic")
    channels_last, reason = comm.gather(fixed if found is None else (found.channels_last, found.reason))[0]
    settled = dataclasses.replace(config, layout="channels_last" if channels_last else "contiguous")
    return dataclasses.replace(job, config=settled, channels_last=channels_last), reason


def open_dataset(config: RunConfig) -> OpenDataset:
    """Open a packed dataset, or HDF5 files as they are."""
    path = find_data(config.data)
    if find_hdf5(path):
        return Hdf5Dataset.open(path, from_table(Hdf5Config, config.data_options, "data_options."))
    if config.data_options:
        raise ConfigError(f"data_options are for HDF5 files that are read without packing, but {path} is none: leave them out")
    return PackedDataset.open(path)


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
    manifest = job.dataset.manifest
    return {
        "ranks": comm.size,
        "nodes": comm.place.num_nodes,
        "replicas": job.replicas,
        "comm": {"kind": comm.kind, "reason": comm_reason},
        "device": str(job.device.type),
        "threads": threads,
        "placement": dataclasses.asdict(job.placement),
        "layout": {"kind": job.config.layout, "reason": layout_reason},
        "sync": how_synced(job),
        "network": {"name": job.config.net, "parameters": parameters},
        "dataset": {"name": manifest.name, "digest": manifest.digest},
        "measures": [dataclasses.asdict(measure) for measure in task_kind(job.config.task).measures],
        "samples": {name: part.count for name, part in manifest.parts.items()} | {"train": job.shards.count},
        "data": _what_the_network_saw(job),
    }


def _what_the_network_saw(job: Job) -> dict[str, Any]:
    """What a trained network needs of its dataset: how raw values became its input, and what its outputs stand for.

    A pixel is scaled from `scale` to 0…1. If it is `standardised`, `mean` is then subtracted, and the rest divided by `deviation`.
    """
    manifest = job.dataset.manifest
    return {
        "shape": list(job.input_shape),
        "classes": list(manifest.classes),
        "scale": list(manifest.scale),
        "mean": list(manifest.mean),
        "deviation": list(manifest.deviation),
        "standardised": make_task(job.config.task).standardise,
        **(manifest.source if manifest.order == "dealt" else {}),  # a packed dataset keeps its own manifest
    }


def how_synced(job: Job) -> dict[str, str]:
    """How replicas agree, and why."""
    return {"strategy": job.config.sync.strategy, "outer": job.config.sync.outer, "reason": job.sync_reason}
