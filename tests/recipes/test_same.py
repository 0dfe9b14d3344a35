"""What ranks must have the same: whatever would train other weights is among it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepex.comm.solo import SoloCommunicator
from deepex.recipes.network import build_network
from deepex.training.config import RunConfig
from deepex.training.gather import make_job
from deepex.training.job import Job
from deepex.training.same import settled, started_with
from tests import networks

MakeData = Callable[[int], Path]


def job_of(data: Path, **keys: Any) -> Job:
    config = RunConfig(net="tests.networks:plain", data=str(data), epochs=1, batch=8, **keys)
    return make_job(config, SoloCommunicator(), build_network, ranks_on_device=1)


def frozen(job: Job) -> Job:
    next(job.network.parameters()).requires_grad_(False)
    return job


def with_buffer(job: Job) -> Job:
    job.network.register_buffer("seen", torch.zeros(1))
    return job


def wider(job: Job) -> Job:
    return dataclasses.replace(job, network=networks.plain(1, (28, 28), 11))


@pytest.mark.parametrize(
    ("change", "told"),
    [(frozen, "the network's 0.weight"), (with_buffer, "the network's seen"), (wider, "the network's 3.bias")],
)
def test_another_layout_is_another_fact(change: Callable[[Job], Job], told: str, make_data: MakeData) -> None:
    facts, others = settled(job_of(make_data(64)), None), settled(change(job_of(make_data(64))), None)
    assert facts.get(told) != others[told]


def test_what_a_run_goes_on_from_and_what_it_reads_are_facts(make_data: MakeData) -> None:
    facts = settled(job_of(make_data(64)), "epoch000001-step000000.safetensors")
    others = settled(job_of(make_data(128), replicas=2), None)
    assert {key for key, fact in facts.items() if others[key] != fact} == {
        "the dataset",
        "the checkpoint",
        "the number of replicas",
        "replicas",
    }


def test_whether_a_run_is_resumed_and_where_are_facts() -> None:
    config = RunConfig(net="lenet", data="sample:fashion")
    one, other = (started_with(config, "cpu", resume=resume, out=out) for resume, out in ((False, "a"), (True, "b")))
    assert {key for key, fact in one.items() if other[key] != fact} == {"--resume", "the run directory"}
