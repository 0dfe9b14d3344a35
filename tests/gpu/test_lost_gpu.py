"""A replica that goes astray on a GPU is left out where turns are long; where they are short, nothing is waited for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.recipes.network import build_network
from deepex.training.build import build
from deepex.training.gather import make_job
from deepex.training.learner import Learner
from deepex.training.session import run_stretch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
STEPS = 64


def _learner(data: Path, steps: int, **changes: object) -> Learner:
    keys = {"net": "lenet", "data": str(data), "batch": 1, "replicas": 3, "validate": "none", "sync.period": steps}
    comm = SoloCommunicator()
    return Learner(build(make_job(deepex.recipe("fashion", {**keys, **changes}), comm, build_network), comm))


def _epoch(learner: Learner, number: int, debug: str = "default") -> None:
    learner.begin_epoch(number, 0)
    torch.cuda.set_sync_debug_mode(debug)
    for stretch in learner.stretches():
        run_stretch(learner, stretch)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("step", ["eager", "captured"])
def test_left_out_of_a_long_turn(
    step: str, deterministic: bool, make_data: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three replicas starts from something that is no number: the mean is that of the other two."""
    learner = _learner(make_data(3 * STEPS), STEPS, step=step, deterministic=deterministic)
    weights, found, begin, end = learner.parts.arena.weights, [], learner.parts.states.begin, learner.parts.states.end
    _epoch(learner, 0)

    def begins(index: int) -> None:
        begin(index)
        if index == 1:
            weights[::7] = torch.nan

    def ends(index: int) -> None:
        end(index)
        found.append(weights.clone())

    with monkeypatch.context() as patched:
        patched.setattr(learner.parts.states, "begin", begins)
        patched.setattr(learner.parts.states, "end", ends)
        _epoch(learner, 1)
    assert (learner.lost, learner.lost_samples) == (1, STEPS)
    assert not found[1].any()
    torch.testing.assert_close(weights, (found[0] + found[2]) / 2)
    assert learner.parts.runner.sums.isfinite().all()
    _epoch(learner, 2)
    assert learner.lost == 0
    assert weights.isfinite().all()
    assert learner.parts.runner.sums.isfinite().all()
    learner.parts.close()


def test_short_turns_are_not_waited_for(make_data: Callable[[int], Path]) -> None:
    learner = _learner(make_data(3 * STEPS), STEPS // 2, step="captured", placement="device")
    _epoch(learner, 0)
    try:
        _epoch(learner, 1, "error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner.parts.close()
