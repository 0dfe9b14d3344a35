"""The weighted mean over replicas, whichever way it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.comm.base import own_zeros
from deepex.comm.solo import SoloCommunicator
from deepex.errors import FailureError
from deepex.sync import Agreement, make_agreement, make_momentum
from deepex.sync.agreement import Accumulated, FixedPoint, InPlace


def make(kind: type[Agreement], agreed: torch.Tensor) -> Agreement:
    agreement = kind(agreed, own=agreed, request=0, **({} if kind is InPlace else {"zeros": own_zeros}))
    agreement.start()
    return agreement


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from([Accumulated, FixedPoint]))
def test_turns_give_the_weighted_mean_and_start_from_the_same_state(replicas: int, seed: int, kind: type[Agreement]) -> None:
    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn(200, generator=generator)
    agreement = make(kind, arena)
    state = arena.clone()
    for _ in range(3):
        counts = torch.randint(0, 5, (replicas,), generator=generator).double()
        counts[0] += 1
        shares = (counts / counts.sum()).tolist()
        expected = torch.zeros(200, dtype=torch.float64)
        for share in shares:
            agreement.begin()
            assert torch.equal(arena[1:], state[1:]), "each replica starts from what was agreed"
            arena.add_(torch.randn(200, generator=generator))
            expected += share * arena.double()
            agreement.add(share)
        agreement.reach(SoloCommunicator(), 1.0)
        assert torch.allclose(arena[1:].double(), expected[1:], atol=1e-6)
        assert agreement.requests == 1.0
        state = arena.clone()


def test_fixed_point_does_not_depend_on_the_order() -> None:
    values = [torch.randn(1000) * 10.0**k for k in range(-4, 4)]
    results = []
    for order in (range(8), reversed(range(8)), (3, 1, 7, 0, 2, 6, 5, 4)):
        arena = torch.zeros(1000)
        agreement = make(FixedPoint, arena)
        for index in order:
            agreement.begin()
            arena.copy_(values[index])
            agreement.add(0.125)
        agreement.reach(SoloCommunicator(), 0.0)
        results.append(arena.clone())
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e8])
def test_fixed_point_refuses_what_it_cannot_hold(value: float) -> None:
    """Whichever turn has it, and before others are told."""
    arena, solo = torch.zeros(10), SoloCommunicator()
    agreement = make(FixedPoint, arena)
    for one in (0.0, value, 1.0):
        agreement.begin()
        arena[5] = one
        agreement.add(0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoloCommunicator, "sum", lambda *_: pytest.fail("summed"))
        with pytest.raises(FailureError, match="deterministic sums cannot hold"):
            agreement.reach(solo, 0.0)
    agreement.start()
    agreement.reach(solo, 0.0)


def test_in_place_weights_and_sums_where_it_lies() -> None:
    arena = torch.ones(10)
    agreement = make(InPlace, arena)
    agreement.add(0.25)
    agreement.reach(SoloCommunicator(), 1.0)
    assert arena.tolist() == [0.25] * 10
    assert agreement.requests > 0
    arena[5] = float("nan")
    agreement.add(0.0)
    agreement.reach(SoloCommunicator(), 0.0)
    assert not arena.any(), "a replica that saw nothing contributes nothing, whatever it holds"


def test_the_way_is_chosen() -> None:
    arena = torch.zeros(8)
    keys = {"own": arena, "request": 0, "zeros": own_zeros}
    assert isinstance(make_agreement(arena, **keys, replicas_per_rank=1, deterministic=False), InPlace)
    assert isinstance(make_agreement(arena, **keys, replicas_per_rank=2, deterministic=False), Accumulated)
    assert isinstance(make_agreement(arena, **keys, replicas_per_rank=1, deterministic=True), FixedPoint)


def test_momentum_policies() -> None:
    momentum = torch.ones(4)
    local = make_momentum("local", momentum, replicas_per_rank=3)
    for index in range(3):
        local.begin(index)
        momentum.add_(index)
        local.end(index)
    local.begin(2)
    assert momentum.eq(2).all()
    assert [float(m[0]) for m in local.stored()] == [0.0, 1.0, 2.0]
    assert make_momentum("local", momentum, replicas_per_rank=1).stored() == [momentum], "a lone replica's stays in the arena"
    make_momentum("reset", momentum, replicas_per_rank=3).begin(1)
    assert not momentum.any()
    assert make_momentum("average", momentum, replicas_per_rank=3).stored() == []
