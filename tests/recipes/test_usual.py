"""What a caller has set in PyTorch changes nothing of a run, and is there afterwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError
from deepex.training.config import RunConfig
from tests.pool import RankPool

MakeData = Callable[[int], Path]


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(torch.float32)


@contextmanager
def products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        assert torch.get_float32_matmul_precision() == precision
        torch.set_float32_matmul_precision(before)


@contextmanager
def products_by_library() -> Iterator[None]:
    """As the newer way has it, after which the older does not answer."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        assert matmul.fp32_precision == "bf16"
        matmul.fp32_precision = before
        assert torch.get_float32_matmul_precision() == "highest"


@contextmanager
def without_onednn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        assert not torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = True


CALLERS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "another device": lambda: torch.device("meta"),
    "float64": default_dtype,
    "rounded products": lambda: products("medium"),
    "rounded by a library": products_by_library,
    "without oneDNN": without_onednn,
}


@pytest.fixture(scope="module")
def usual(make_data: MakeData, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    config = RunConfig(
        net="lenet", data=str(make_data(48)), batch=8, epochs=2, threads=1, sampling=0, device="cpu", layout="contiguous"
    )
    run = deepex.train(config, SoloCommunicator(), out=tmp_path_factory.mktemp("usual") / "run")
    return config, load_file(run.path / "weights.safetensors")


@pytest.mark.parametrize("name", CALLERS)
def test_a_run_follows_from_its_configuration_alone(
    name: str, usual: tuple[RunConfig, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    config, weights = usual
    caller: Callable[[], AbstractContextManager[object]] = CALLERS[name]
    with ExitStack() as held:
        held.enter_context(caller())
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        run = deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
        assert before == (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    found = load_file(run.path / "weights.safetensors")
    assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_a_callers_random_numbers_go_on(usual: tuple[RunConfig, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    deepex.train(usual[0], SoloCommunicator(), out=tmp_path / "run")
    assert torch.initial_seed() == 99
    assert torch.equal(torch.rand(3), expected)


def train_with_one_wrong(comm: Any, what: str, out: str) -> str:
    """What this rank is told."""
    config = deepex.recipe("fashion", {"samples": 64, "batch": 8, "epochs": 1, "validate": "none"})
    given = comm
    if what == "inter":
        half = comm.Split(comm.rank)
        given = half.Create_intercomm(0, comm, 1 - comm.rank)
    if what == "freed":
        given = comm.Dup()
        given.Free()
    try:
        deepex.train(None if what == "config" and comm.rank == 1 else config, given, out=out)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("config", "rank 1 on "),
        ("inter", "comm is an intercommunicator; give the communicator of one group"),
        ("freed", "comm is MPI.COMM_NULL, as one is that was freed"),
    ],
)
def test_every_rank_is_told_of_what_one_gives_wrong(what: str, said: str, ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(train_with_one_wrong, what, tmp_path / "run")
    assert all(one.startswith(said) for one in told), told
    assert what != "config" or "config is a NoneType; it must be a RunConfig" in told[0]


def test_a_table_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config is a dict; it must be a RunConfig"):
        deepex.train({"net": "lenet"}, out=tmp_path / "run")
