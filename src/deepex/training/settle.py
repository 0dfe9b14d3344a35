"""Every "auto" of a configuration, decided in one place: a pure function of facts that were gathered before.

    plan = settle(config, facts)
    plan.config.sync.strategy, plan.reasons["sync"]
    plan = settle(config, replace(facts, order=tried))      # what was left open until somebody tried it

It needs no ranks, files or devices, and all ranks come to the same from the same facts. The communicator alone is chosen before,
because facts are gathered through it (comm/selection.py, in the same way).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from deepex.data.feeds.placement import Placement, choose_placement, most_modest
from deepex.data.feeds.shard import Shards
from deepex.errors import ConfigError
from deepex.step.image_order import ImageOrder
from deepex.sync.config import SyncConfig
from deepex.sync.how.auto import FEW_STEPS, is_undecided, settled, timed
from deepex.sync.how.strategy import slices_of_each
from deepex.training.config import RunConfig

_LABEL_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank has: cores and host memory are its share of its node's; on a CPU, the device is the host.

    `threads`: how many it is to have, which may differ from rank to rank; 0 leaves it to us.
    """

    cores: int
    free_host_bytes: int
    free_device_bytes: int
    ranks_on_device: int = 1
    threads: int = 0


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A dataset: its directory, samples to train on and to validate on, their size, and whether they come in a given order."""

    directory: str
    train: int
    validation: int
    sample_bytes: int
    given_order: bool


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """A network: what its weights and a step's activations take (None: unknown), the operations of a sample and of a step of Muon.

    Those of a sample are 0 where nothing follows from them. `statistics`: whether it has `running` ones, `frozen` ones or `none`.
    """

    weight_bytes: int
    activation_bytes: int | None
    sample_flops: float
    muon_flops: float
    statistics: str


@dataclass(frozen=True, kw_only=True)
class SyncTimes:
    """How many steps a sync takes, and one of a part in the background; whether that could be of use (`hides`)."""

    cost: float
    part: float
    hides: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that decisions follow from. `order` and `times` come from trials, of the image order, and of a step and a sync."""

    ranks: tuple[RankFacts, ...]
    device: str
    data: DataFacts
    network: NetworkFacts
    order: ImageOrder | None = None
    times: SyncTimes | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The configuration without an "auto" that can be settled yet, what follows from it, and by topic the reasons why."""

    config: RunConfig
    shards: Shards
    placement: Placement
    threads: tuple[int, ...]
    estimates: bool
    reasons: dict[str, str]

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.shards.replicas

    @property
    def channels_last(self) -> bool:
        """Whether images lie so in memory."""
        return self.config.layout == "channels_last"

    @property
    def wants_order(self) -> bool:
        """Whether the image order is to be tried."""
        return self.config.layout == "auto"


def settle(config: RunConfig, facts: Facts) -> Plan:
    """Decide what the facts allow to."""
    size = len(facts.ranks)
    shards = split(config, facts.data, config.replicas_on(size))
    config.sync.kind.check_replicas(config.sync, replicas=shards.replicas, per_rank=shards.replicas // size)
    sync, sync_reason = _sync(config, facts, shards)
    layout, layout_reason = _layout(config, facts)
    estimates, statistics_reason = _estimates(config, facts, shards)
    done = replace(config, sync=sync, layout=layout)
    placement = most_modest([_placement(done, facts, rank, shards) for rank in facts.ranks])
    reasons = {"sync": sync_reason, "layout": layout_reason, "placement": placement.reason, "statistics": statistics_reason}
    return Plan(
        config=done,
        shards=shards,
        placement=placement,
        threads=tuple(rank.threads or (1 if config.deterministic else max(1, rank.cores)) for rank in facts.ranks),
        estimates=estimates,
        reasons=reasons,
    )


def split(config: RunConfig, data: DataFacts, replicas: int) -> Shards:
    """Split the training samples that the run has over its replicas."""
    if config.samples > data.train:
        raise ConfigError(f"samples is {config.samples}, but {data.directory} has {data.train} to train on: set at most that, or 0")
    return Shards(config.samples or data.train, replicas, config.batch)


def _sync(config: RunConfig, facts: Facts, shards: Shards) -> tuple[SyncConfig, str]:
    """How replicas agree. As many operations of Muon take a third to ten times as long as those of a step, on an H200."""
    step = 3 * config.batch * facts.network.sample_flops * (shards.replicas // len(facts.ranks))
    outer_steps = facts.network.muon_flops / step if step else math.inf
    sync, reason = settled(config.sync, replicas=shards.replicas, steps=shards.steps, outer_steps=lambda: outer_steps)
    times = facts.times
    if times is not None and times.hides and is_undecided(sync):
        found = timed(sync, steps=shards.steps, cost=times.cost, part=times.part)
        sync, reason = found if found is not None else (sync, reason)
    return sync, reason


def _layout(config: RunConfig, facts: Facts) -> tuple[Any, str]:
    if config.layout != "auto":
        return config.layout, "asked for"
    if config.deterministic:
        return "contiguous", "fixed, because deterministic"
    if facts.order is None:
        return "auto", "not tried yet"
    return "channels_last" if facts.order.channels_last else "contiguous", facts.order.reason


def _estimates(config: RunConfig, facts: Facts, shards: Shards) -> tuple[bool, str]:
    """Whether batch norm's statistics are estimated anew before the network is evaluated."""
    if facts.network.statistics != "running":
        frozen = facts.network.statistics == "frozen"
        return False, "the network's running statistics are frozen" if frozen else "the network has no running statistics"
    if config.statistics != "auto":
        return config.statistics == "estimated", "asked for"
    few = shards.replicas > 1 and shards.steps < FEW_STEPS  # running statistics are of other weights
    told = f"{shards.replicas} replicas, {shards.steps} steps in an epoch: running statistics"
    return few, f"{told} {'lag behind' if few else 'keep up'}"


def _placement(config: RunConfig, facts: Facts, rank: RankFacts, shards: Shards) -> Placement:
    """The placement that a rank has memory for."""
    data, size, on_gpu = facts.data, len(facts.ranks), facts.device == "cuda"
    per_rank = shards.replicas // size
    held = 0 if config.validate == "none" else -(-data.validation // size) if config.validate == "parallel" else data.validation
    return choose_placement(
        config.placement,
        samples_bytes=(per_rank * shards.size(0) + held) * (data.sample_bytes + _LABEL_BYTES),
        arena_bytes=_arena_slices(config, per_rank, on_gpu=on_gpu) * facts.network.weight_bytes,
        activation_bytes=facts.network.activation_bytes,
        device=facts.device,
        free_device_bytes=rank.free_device_bytes,
        free_host_bytes=rank.free_host_bytes,
        ranks_on_device=rank.ranks_on_device,
        through_host=on_gpu and data.given_order,
        replicas_per_rank=per_rank,
    )


def _arena_slices(config: RunConfig, per_rank: int, *, on_gpu: bool) -> int:
    """How many times the weights a rank holds.

    With gradients and the optimiser's states; on a GPU also the gradients that a captured step makes (in bf16 of half the size, and
    as much for the bf16 weights where gradients are gathered); local states of several replicas, which wait in host memory; for
    outer momentum what it steps from, and its velocity; and what the strategy, or the wire's code, holds beside.
    """
    sync, policies = config.sync, [*config.state_policies.values()]
    agreed = 1 + policies.count("average")
    slices = 2 + len(policies) + on_gpu + 2 * (sync.outer != "none")
    if sync.wire != "fp32":
        return slices + slices_of_each(per_rank) * agreed
    waiting = per_rank * policies.count("local") if per_rank > 1 and not on_gpu else 0
    return slices + sync.kind.slices(sync, per_rank=per_rank, deterministic=config.deterministic) * agreed + waiting


def by_rank(rows: Sequence[dict[str, int]]) -> tuple[RankFacts, ...]:
    """What ranks have told of themselves."""
    return tuple(RankFacts(**row) for row in rows)
