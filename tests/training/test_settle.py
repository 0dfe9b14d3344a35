"""Every "auto" is decided by one pure function: no ranks, no files, no device."""

from dataclasses import replace
from typing import Any

import pytest

from deepex.errors import ConfigError
from deepex.step.image_order import ImageOrder
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig
from deepex.training.settle import DataFacts, Facts, NetworkFacts, RankFacts, SyncTimes, settle

GB = 10**9
RANK = RankFacts(cores=4, free_host_bytes=8 * GB, free_device_bytes=8 * GB)


def facts(*ranks: RankFacts, train: int = 64_000, **changes: Any) -> Facts:
    data = DataFacts(directory="here", train=train, validation=1000, sample_bytes=1000, given_order=False)
    network = NetworkFacts(weight_bytes=10**6, activation_bytes=10**6, sample_flops=1e6, muon_flops=1e6, statistics="running")
    return replace(Facts(ranks=ranks or (RANK, RANK), device="cpu", data=data, network=network), **changes)


def config(**keys: Any) -> RunConfig:
    return RunConfig(net="lenet", data="here", **keys)


def test_what_is_asked_for_stays() -> None:
    asked = config(layout="contiguous", threads=3, placement="stream", statistics="estimated", sync=SyncConfig(period=4))
    plan = settle(asked, facts(replace(RANK, threads=3), replace(RANK, threads=2)))
    assert plan.config == asked
    assert (plan.replicas, plan.threads, plan.placement.kind, plan.estimates) == (2, (3, 2), "stream", True)
    assert {plan.reasons[topic].split(";")[0] for topic in ("sync", "layout", "placement", "statistics")} == {"asked for"}


def test_every_auto_has_a_value_and_a_reason() -> None:
    plan = settle(config(sync=SyncConfig(strategy="auto")), facts(order=ImageOrder(channels_last=True, reason="it was faster")))
    assert (plan.config.layout, plan.reasons["layout"], plan.channels_last) == ("channels_last", "it was faster", True)
    assert plan.config.sync.period == "auto"
    assert plan.threads == (4, 4)
    assert plan.placement.kind == "device"
    assert "keep up" in plan.reasons["statistics"]
    assert all(plan.reasons.values())


def test_the_order_is_left_open_until_somebody_tried_it() -> None:
    assert settle(config(), facts()).wants_order
    assert not settle(config(deterministic=True), facts()).wants_order, "a trial would decide by the clock"
    assert settle(config(deterministic=True), facts()).config.layout == "contiguous"


def test_all_ranks_take_the_placement_of_the_most_modest() -> None:
    poor = replace(RANK, free_host_bytes=10**6, free_device_bytes=10**6, cores=2)
    plan = settle(config(), facts(RANK, poor, RANK))
    assert plan.placement.kind == "stream"
    assert plan.threads == (4, 2, 4)


@pytest.mark.parametrize(
    ("times", "strategy"),
    [
        (None, "auto"),
        (SyncTimes(cost=40.0, part=5.0, hides=True), "background"),
        (SyncTimes(cost=40.0, part=5.0, hides=False), "auto"),
        (SyncTimes(cost=0.01, part=0.01, hides=True), "auto"),
    ],
)
def test_syncs_are_hidden_where_times_say_so(times: SyncTimes | None, strategy: str) -> None:
    plan = settle(config(sync=SyncConfig(strategy="auto"), batch=8), facts(times=times))
    assert plan.config.sync.strategy == strategy
    assert ("in the background" in plan.reasons["sync"]) == (strategy == "background")


def test_few_steps_bring_muon_and_estimated_statistics() -> None:
    plan = settle(config(sync=SyncConfig(strategy="auto")), facts(train=640))
    assert (plan.config.sync.outer, plan.config.sync.period, plan.estimates) == ("muon", 1, True)
    assert "Muon" in plan.reasons["sync"]


@pytest.mark.parametrize(("kind", "said"), [("none", "has no running statistics"), ("frozen", "are frozen")])
def test_networks_without_statistics_estimate_none(kind: str, said: str) -> None:
    network = replace(facts().network, statistics=kind)
    plan = settle(config(statistics="estimated"), facts(network=network))
    assert (plan.estimates, said in plan.reasons["statistics"]) == (False, True)


def test_strategies_that_hold_more_leave_less_room_for_samples() -> None:
    least = settle(config(replicas=8), facts()).placement.estimate["arena_bytes"]
    more = {name: settle(config(replicas=8, sync=SyncConfig(strategy=name)), facts()) for name in ("elastic", "hierarchical")}
    assert more["elastic"].placement.estimate["arena_bytes"] == least + 12 * 10**6, "4 + 4 slices of weights and momentum for 2"
    assert more["hierarchical"].placement.estimate["arena_bytes"] == least + 4 * 10**6, "twice what the mean holds"


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="3 replicas cannot live on 2 ranks"):
        settle(config(replicas=3), facts())
    with pytest.raises(ConfigError, match="samples is 70000, but here has 64000"):
        settle(config(samples=70_000), facts())
    with pytest.raises(ConfigError, match=r"sync\.group is 3"):
        settle(config(replicas=4, sync=SyncConfig(strategy="hierarchical", group=3)), facts())


def test_the_same_facts_give_the_same_plan_and_are_left_alone() -> None:
    asked, known = config(sync=SyncConfig(strategy="auto")), facts()
    assert settle(asked, known) == settle(asked, known)
    assert known == facts()
