"""What a caller has set in PyTorch changes nothing of a run on a GPU either, but for rounding: it adds in any order."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch

import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.comm.solo import SoloCommunicator
from deepex.training.config import RunConfig

pytestmark = pytest.mark.gpu

CALLERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": ExitStack,
    "autocast": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
    "no gradients": torch.no_grad,
    "another device": lambda: torch.device("cuda"),
}


@pytest.mark.parametrize("step", ["eager", "captured"])
def test_a_run_follows_from_its_configuration_alone(step: str, make_data: Callable[[int], Path], tmp_path: Path) -> None:
    keys = {"batch": 8, "epochs": 2, "sampling": 0, "device": "cuda", "step": step, "optim": OptimConfig(rate=0.002)}
    config = RunConfig(net="lenet", data=str(make_data(480)), **keys)
    usual = [e.train.loss for e in deepex.train(config, SoloCommunicator(), out=tmp_path / "usual").epochs()]
    precision = torch.get_float32_matmul_precision()
    for name, caller in CALLERS.items():
        with ExitStack() as held:
            held.enter_context(caller())
            torch.cuda.manual_seed(5)
            expected = torch.rand(2, device="cuda")
            torch.cuda.manual_seed(5)
            run = deepex.train(config, SoloCommunicator(), out=tmp_path / name)
            assert torch.equal(torch.rand(2, device="cuda"), expected), name
        assert [epoch.train.loss for epoch in run.epochs()] == pytest.approx(usual, rel=2e-4), name
    assert torch.get_float32_matmul_precision() == precision
