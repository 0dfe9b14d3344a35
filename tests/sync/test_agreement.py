"""The plain mean over replicas, whichever way it is computed, and the policies of an optimiser's states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.comm import Background, WrappedCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.errors import FailureError
from deepex.sync.agreement import Agreement
from deepex.sync.how.background import Delayed
from deepex.sync.mean import InPlace, SharedArenaMean
from deepex.sync.outer import make_outer
from deepex.sync.outer.outer import Outer
from deepex.sync.states import make_states
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import FixedTotal, FloatTotal, Total
from tests.full import examples

KINDS = (FloatTotal, FixedTotal)


def region_of(arena: torch.Tensor, lost: int | None = None) -> SyncedSlice:
    all_parts = slice(0, len(arena))
    return SyncedSlice(agreed=arena, buffers=slice(0, 10), weights=slice(10, len(arena)), own=all_parts, request=0, lost=lost)


def make(kind: type[Total], arena: torch.Tensor, lost: int | None = None) -> Agreement:
    buffer = torch.zeros(len(arena), dtype=torch.int64 if kind is FixedTotal else arena.dtype)
    agreement = SharedArenaMean(region_of(arena, lost), kind(buffer))
    agreement.start()
    return agreement


def reach(agreement: Agreement, request: float = 0.0) -> None:
    agreement.reach(SoloCommunicator(), request=request, rate=0.1)


@settings(max_examples=examples(10, 40), deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_turns_give_the_weighted_mean_and_start_from_the_same_state(replicas: int, seed: int, kind: type[Total]) -> None:
    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn(200, generator=generator)
    agreement = make(kind, arena)
    state = arena.clone()
    for _ in range(3):
        counts = torch.randint(0, 5, (replicas,), generator=generator).double()
        counts[0] += 1
        shares = (counts / counts.sum()).tolist()
        expected = torch.zeros(200, dtype=torch.float64)
        for index, share in enumerate(shares):
            agreement.begin(index)
            assert torch.equal(arena[1:], state[1:]), "each replica starts from what was agreed"
            arena.add_(torch.randn(200, generator=generator))
            expected += share * arena.double()
            agreement.add(index, share)
        reach(agreement, 1.0)
        assert torch.allclose(arena[1:].double(), expected[1:], atol=1e-6)
        assert agreement.requests == 1.0
        state = arena.clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [2, 10, 12])
def test_of_replicas_that_are_all_lost_there_is_no_mean(replicas: int, kind: type[Total]) -> None:
    """Also where their shares, as they are added, are not quite one: ten tenths are a little more, twelve twelfths less."""
    arena = torch.ones(200)
    arena[1] = 0
    agreement = make(kind, arena, lost=1)
    for index in range(replicas):
        agreement.begin(index)
        agreement.lose()
        agreement.add(index, 1 / replicas)
    reach(agreement)
    assert arena[2:].isnan().all()
    assert arena[1] == 0


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(("device", "expected"), [("cpu", [True, True]), ("meta", [False, True])])
def test_a_device_is_waited_for_after_long_turns_only(device: str, expected: list[bool], outer: bool) -> None:
    """Meta stands for any device that is no CPU; that nothing is waited for in short turns is seen on a GPU (tests/gpu)."""
    synced = region_of(torch.empty(200, device=device), lost=1)
    inner = InPlace(synced)
    agreement = Outer(inner, make_outer("slowmo", synced, rate=1.0, momentum=0.5, peak=0.1)) if outer else inner
    found = []
    for steps in (63, 64):
        agreement.watch(steps)
        found.append(agreement.leaves_out)
    assert found == expected


def test_fixed_point_does_not_depend_on_the_order() -> None:
    values = [torch.randn(1000) * 10.0**k for k in range(-4, 4)]
    results = []
    for order in (range(8), reversed(range(8)), (3, 1, 7, 0, 2, 6, 5, 4)):
        arena = torch.zeros(1000)
        agreement = make(FixedTotal, arena)
        for index in order:
            agreement.begin(index)
            arena.copy_(values[index])
            agreement.add(index, 0.125)
        reach(agreement)
        results.append(arena.clone())
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e8])
def test_fixed_point_refuses_what_it_cannot_hold(value: float) -> None:
    """Whichever turn has it, and before others are told."""
    arena = torch.zeros(10)
    agreement = make(FixedTotal, arena)
    for index, one in enumerate((0.0, value, 1.0)):
        agreement.begin(index)
        arena[5] = one
        agreement.add(index, 0.25)
    refusing = WrappedCommunicator(SoloCommunicator(), lambda call: pytest.fail(call.what))
    with pytest.raises(FailureError, match="deterministic sums cannot hold"):
        agreement.reach(refusing, request=0.0, rate=0.1)
    agreement.start()
    reach(agreement)


def test_in_place_weights_and_sums_where_it_lies() -> None:
    arena = torch.ones(10)
    agreement = InPlace(region_of(arena))
    agreement.add(0, 0.25)
    reach(agreement, 1.0)
    assert arena.tolist() == [0.25] * 10
    assert agreement.requests > 0
    arena[5] = float("nan")
    agreement.add(0, 0.0)
    reach(agreement)
    assert not arena.any(), "a replica that saw nothing contributes nothing, whatever it holds"


def test_policies_of_states() -> None:
    momentum, squares, mean = torch.ones(4), torch.ones(4), torch.ones(4)
    states, policies = {"momentum": momentum, "squares": squares, "mean": mean}, {"momentum": "local", "squares": "reset"}
    local = make_states(policies | {"mean": "average"}, states, replicas_per_rank=3)
    for index in range(3):
        local.begin(index)
        momentum.add_(index)
        local.end(index)
    local.begin(2)
    assert momentum.eq(2).all()
    assert not squares.any()
    assert mean.eq(1).all()
    assert {name: [float(m[0]) for m in stored] for name, stored in local.stored().items()} == {"momentum": [0.0, 1.0, 2.0]}
    alone = make_states(policies, states, replicas_per_rank=1)
    assert alone.stored() == {"momentum": [momentum]}, "a lone replica's stays in the arena"


def test_in_the_background_a_request_is_told_with_the_part_in_which_it_travelled() -> None:
    """And not once more in a run that goes on from what was kept then."""

    def delayed() -> Delayed:
        synced = region_of(torch.ones(40))
        total = FloatTotal(torch.zeros(40))
        return Delayed(synced, total, replicas_per_rank=1, worker=Background(SoloCommunicator()), pull=1.0, delay=0, parts=3)

    def told(agreement: Delayed, number: int, request: float) -> float:
        agreement.prepare(number, all_parts=False)
        agreement.begin(0)
        agreement.pause(0)
        agreement.add(0, 1.0)
        reach(agreement, request)
        return float(agreement.requests)

    first, again = delayed(), delayed()
    first.start()
    assert [told(first, number, float(number >= 2)) for number in range(5)] == [0, 0, 0, 0, 1], (
        "asked at 3, the mean of which comes"
    )
    first.settle()
    kept, into = first.kept(), again.state()
    into.shared["mean"].copy_(kept.shared["mean"])
    into.own["weights"][0].copy_(kept.own["weights"][0])
    again.resume()
    assert [told(again, number, 0.0) for number in range(5, 9)] == [0, 0, 0, 0]
    for agreement in (first, again):
        agreement.close()


# A request to stop


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", [InPlace, FloatTotal, FixedTotal])
def test_a_request_is_heard_whatever_share_the_rank_has(kind: type, share: float) -> None:
    """Also from a rank whose shard has no sample in the stretch, which adds nothing else."""
    arena = torch.full((200,), 4.0)
    agreement = InPlace(region_of(arena)) if kind is InPlace else make(kind, arena)
    agreement.begin(0)
    agreement.add(0, share)
    reach(agreement, 1.0)
    assert agreement.requests > 0
    assert torch.equal(arena[1:], torch.full((199,), 4.0 * share))
    agreement.begin(0)
    agreement.add(0, share)
    reach(agreement, 0.0)
    assert agreement.requests == 0
