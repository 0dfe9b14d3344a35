"""Gather what a configuration names and what decisions follow from: dataset, network, device, and the facts of each rank.

    job = make_job(config, comm, build_network)         # this rank's; its plan is as if all ranks were like it
    job = agree(job, comm, checkpoint=None)             # collective: the plan of all
    job = try_order(job, comm)                          # collective, where the image order is left open

Everything that a mistake in the configuration could spoil is opened, built and checked here, before anything is trained.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from deepex.arena.mode import begin_training
from deepex.comm import Communicator
from deepex.comm.same import gather_same
from deepex.data.feeds.shard import Shards
from deepex.data.find import OpenDataset, open_dataset
from deepex.data.manifest import Manifest
from deepex.errors import ConfigError, DataError
from deepex.machine.hardware import describe_cpu, describe_memory
from deepex.machine.heap import give_back_heap
from deepex.record.target import Target
from deepex.step.choose import check_settings
from deepex.step.cost import activation_bytes, forward_flops, takes_one
from deepex.step.image_order import ImageOrder, choose_order
from deepex.sync.how.auto import wants_load
from deepex.sync.outer.muon import muon_flops
from deepex.task import TASKS, make_task, task_kind
from deepex.training.batch_norm import statistics_kind
from deepex.training.config import RunConfig
from deepex.training.job import Job
from deepex.training.same import settled
from deepex.training.settle import DataFacts, Facts, NetworkFacts, RankFacts, by_rank, settle, split
from deepex.training.trial import check_network

BuildNetwork = Callable[[RunConfig, Manifest], nn.Module]


def make_job(config: RunConfig, comm: Communicator, build_network: BuildNetwork, *, ranks_on_device: int = 1) -> Job:
    """Open, build and check what the configuration names. `ranks_on_device`: how many ranks use this one's GPU."""
    replicas = config.replicas_on(comm.size)
    config.sync.kind.check_replicas(config.sync, replicas=replicas, per_rank=replicas // comm.size)
    dataset = open_dataset(config.data, config.data_options)
    _check_dataset(config, dataset)
    data = _data_facts(dataset)
    shards = split(config, data, replicas)
    device = pick_device(config.device, comm.place.local_rank)
    check_settings(config.step, device)
    network = build_network(config, dataset.manifest)
    channels, height, width = dataset.manifest.shape
    shape = (channels, *config.augment.size(height, width))
    _check_last_batch(config, network, shards, shape)
    moving, activations = frozenset[str](), None
    if ":" in config.net:  # a network of somebody's own is tried; ours are known to train, and to leave what is frozen alone
        trial = check_network(network, config, dataset, shards, ranks=comm.size)
        moving, activations = trial.moving, trial.activation_bytes(config.batch)
    else:
        activations = activation_bytes(network, shape, config.batch)
    facts = Facts(
        ranks=(_rank_facts(config, device, comm, ranks_on_device),) * comm.size,
        device=device.type,
        data=data,
        network=_network_facts(config, begin_training(network), shards, shape, activations),
    )
    plan = settle(config, facts)
    return Job(asked=config, facts=facts, plan=plan, network=network, dataset=dataset, device=device, moving=moving)


def agree(job: Job, comm: Communicator, *, checkpoint: str | None = None) -> Job:
    """Plan with the facts of every rank, after seeing that all have the same configuration, dataset and network. Collective.

    So must be the name of the `checkpoint` to go on from.
    """
    own = dataclasses.asdict(job.facts.ranks[comm.rank])
    told = gather_same(comm, settled(job, checkpoint), own)
    return job.settled(dataclasses.replace(job.facts, ranks=by_rank(told)))


def try_order(job: Job, comm: Communicator) -> Job:
    """Try the image order, where it is left open: rank 0 does, because a sync needs the same on every rank. Collective then."""
    if not job.plan.wants_order:
        return job
    told = {}
    if comm.rank == 0:
        task = make_task(job.config.task)
        found = choose_order(job.network, shape=job.input_shape, batch=job.config.batch, task=task, device=job.device)
        told = dataclasses.asdict(found)
        give_back_heap()  # else the run would carry what the trial took
    return job.settled(dataclasses.replace(job.facts, order=ImageOrder(**comm.gather(told)[0])))


def _check_dataset(config: RunConfig, dataset: OpenDataset) -> None:
    if task_kind(config.task).needs_labels and not dataset.manifest.classes:
        others = " or ".join(name for name, kind in TASKS.items() if not kind.needs_labels)
        raise DataError(f"{dataset.directory} has no labels, which the task {config.task} needs: set task={others}")
    if config.target is not None and Target.parse(str(config.target)).part not in dataset.manifest.parts:
        raise ConfigError(f"target is {config.target!r}, but {dataset.directory} has no validation part: set a target of train")


def _check_last_batch(config: RunConfig, network: nn.Module, shards: Shards, shape: tuple[int, ...]) -> None:
    """A last batch of one sample is too few for some networks, which would be told at the end of an epoch only."""

    def leaves_one(batch: int) -> bool:
        return any(shards.size(replica) % batch == (batch > 1) for replica in (0, shards.replicas - 1))

    if not leaves_one(config.batch) or takes_one(network, shape):
        return
    near = sorted(range(2, shards.size(shards.replicas - 1) + 1), key=lambda batch: abs(batch - config.batch))
    better = next((f"set batch={batch}" for batch in near if not leaves_one(batch)), "use fewer replicas")
    raise ConfigError(
        f"batch {config.batch} leaves a last batch of 1 sample, of which batch norm in this network can make nothing (replicas "
        f"have {shards.size(0)} samples each, or one less): {better}"
    )


def _data_facts(dataset: OpenDataset) -> DataFacts:
    manifest = dataset.manifest
    validation = manifest.parts.get("validation")
    return DataFacts(
        directory=str(dataset.directory),
        train=dataset.part("train").count,
        validation=validation.count if validation is not None else 0,
        sample_bytes=manifest.sample_bytes,
        given_order=manifest.order == "given",
    )


def _network_facts(
    config: RunConfig, network: nn.Module, shards: Shards, shape: tuple[int, ...], activations: int | None
) -> NetworkFacts:
    parameters = list(network.parameters())
    counts = wants_load(config.sync, replicas=shards.replicas, steps=shards.steps)
    return NetworkFacts(
        weight_bytes=sum(parameter.nbytes for parameter in parameters),
        activation_bytes=activations,
        sample_flops=forward_flops(network, shape) if counts else 0.0,
        muon_flops=muon_flops(parameter.shape for parameter in parameters),
        statistics=statistics_kind(network),
    )


def _rank_facts(config: RunConfig, device: torch.device, comm: Communicator, ranks_on_device: int) -> RankFacts:
    free = (describe_memory()["available_bytes"] or 0) // comm.place.local_size
    on_gpu = device.type == "cuda"
    return RankFacts(
        cores=(describe_cpu()["num_cores_usable"] or 1) // comm.place.local_size,
        free_host_bytes=free,
        free_device_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else free,
        ranks_on_device=ranks_on_device if on_gpu else 1,
        threads=config.threads,
    )


def pick_device(asked: str, local_rank: int) -> torch.device:
    """Pick the accelerator of a rank: its own where there are enough, a shared one where there are not."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU: check the driver with `deepex doctor`, or set device=cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())
