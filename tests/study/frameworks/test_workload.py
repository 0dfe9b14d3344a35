"""What every framework gets: all samples, once each, in as many steps on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepex.comm.solo import SoloCommunicator
from deepex.data.feeds.shard import Shards
from deepex.errors import ConfigError, UnknownName
from deepex.recipes import recipe
from deepex.study.frameworks import FRAMEWORKS, available, find
from deepex.study.frameworks.base import UnsupportedTask
from deepex.study.frameworks.workload import make_workload, step_lengths
from deepex.training.config import RunConfig
from tests.study.frameworks.running import SMALL


def config(data: Path, **changes: Any) -> RunConfig:
    return recipe("fashion", SMALL | {"data": str(data)} | {key.replace("__", "."): value for key, value in changes.items()})


@given(count=st.integers(4, 400), ranks=st.integers(1, 8), batch=st.integers(2, 40))
def test_ranks_make_as_many_steps_and_leave_nobody_out(count: int, ranks: int, batch: int) -> None:
    if ranks > count // batch:
        return
    shards = Shards(count, ranks, batch)
    lengths = [step_lengths(shards.size(rank), batch, shards.steps) for rank in range(ranks)]
    assert {len(some) for some in lengths} == {shards.steps}
    assert [sum(some) for some in lengths] == [shards.size(rank) for rank in range(ranks)]
    assert all(1 <= n <= batch for some in lengths for n in some)


def test_samples_are_standardised_and_all_visited(make_data: Callable[[int], Path]) -> None:
    task = make_workload(config(make_data(200)), SoloCommunicator(), threads=1)
    samples, (order, lengths) = task.train(), task.plan(1)
    assert samples.images.shape == (200, 28, 28, 1)
    assert abs(samples.images.mean()) < 1e-4
    assert abs(samples.images.std() - 1) < 1e-3
    assert np.array_equal(np.sort(order), np.arange(200))
    assert lengths == [16] * 12 + [8]
    assert task.shares == [1.0] * 13
    assert len(task.validation().images) == 64
    assert not np.array_equal(order, task.plan(2)[0])


def test_decay_leaves_biases_alone(make_data: Callable[[int], Path]) -> None:
    task = make_workload(config(make_data(200)), SoloCommunicator(), threads=1)
    names = {name for name, _ in task.network.named_parameters()}
    assert task.decayed == {name for name in names if not name.endswith("bias")}
    assert all(isinstance(parameter, torch.Tensor) for parameter in task.network.parameters())


def test_every_framework_tells_its_version_or_the_remedy() -> None:
    for name, found in available().items():
        assert find(name).name == name
        assert found.version or "pip install" in found.reason
    assert str(available()["pytorch"].version).split("+")[0] == f"torch {torch.__version__}".split("+")[0]
    with pytest.raises(UnknownName, match="jax, keras, lightning, pytorch"):
        find("caffe")


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("optim__method", "lars", "lars"), ("augment__flip", True, "augment"), ("replicas", 4, "replicas")],
)
def test_what_frameworks_do_not_do_is_refused(name: str, key: str, value: Any, what: str, make_data: Callable[[int], Path]) -> None:
    with pytest.raises(UnsupportedTask, match=f"{name} does not train this here: .*{what}.*; set "):
        find(name).check(config(make_data(200), **{key: value}), ranks=2)


@pytest.mark.parametrize("name", ["jax", "keras"])
def test_a_network_without_translation_is_refused(name: str, make_data: Callable[[int], Path]) -> None:
    other = config(make_data(200), net="cvae", task="reconstruct")
    with pytest.raises(UnsupportedTask, match="reconstruct and its networks are not translated"):
        find(name).check(other, ranks=1)
    find("pytorch").check(other, ranks=1)


def test_keras_refuses_a_rate_that_changes(make_data: Callable[[int], Path]) -> None:
    with pytest.raises(UnsupportedTask, match=r"optim\.schedule=constant"):
        find("keras").check(config(make_data(200), optim__schedule="cosine"), ranks=1)


def test_uneven_shards_need_batches_of_two(make_data: Callable[[int], Path]) -> None:
    with pytest.raises(ConfigError, match="set batch to 2"):
        make_workload(config(make_data(193), batch=1), _Two(), threads=1)


class _Two(SoloCommunicator):  # type: ignore[misc] # rank 0 of 2, as far as shards go
    @property
    def size(self) -> int:
        return 2
