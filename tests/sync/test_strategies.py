"""Each strategy is what its paper says: against R full copies in float64, on a convex problem, and on real ranks."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.comm.base import own_zeros
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.errors import ConfigError
from deepex.sync.config import SyncConfig
from deepex.sync.how.auto import is_undecided, timed
from deepex.sync.how.auto import settled as settled_sync
from deepex.sync.outer import make_outer
from deepex.sync.outer.muon import muon_flops, orthogonal
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import make_total
from deepex.sync.wire import wires
from deepex.sync.wire.coded import Coded
from tests.full import FULL, examples
from tests.mpi import run_ranks
from tests.pool import RankPool
from tests.sync.ranks import WAYS, of_replicas, train_ways
from tests.sync.toy import BUFFERS, MATRICES, Problem, reference, train

STRATEGIES: dict[str, dict[str, Any]] = {
    "weights": {},
    "slowmo": {"outer": "slowmo", "outer_rate": 0.8, "outer_momentum": 0.3},
    "nesterov": {"outer": "nesterov", "outer_rate": 0.5, "outer_momentum": 0.6},
    "adam": {"outer": "adam", "outer_rate": 0.05, "outer_momentum": 0.5},
    "trust": {"outer": "trust", "outer_rate": 0.03, "outer_momentum": 0.5},
    "muon": {"outer": "muon", "outer_rate": 0.03, "outer_momentum": 0.5},
    "elastic": {"strategy": "elastic"},
    "streaming": {"strategy": "streaming", "parts": 3},
    "background": {"strategy": "background", "parts": 1, "pull": 0.7, "delay": 2},
    "background in parts": {"strategy": "background", "parts": 3},
    "hierarchical": {"strategy": "hierarchical", "between": 2},
    "hierarchical slowmo": {"strategy": "hierarchical", "between": 3, "outer": "slowmo"},
}


RELATIVE = ("adam", "trust", "muon")  # whose steps have a length of their own, so they end near an optimum and not in it


# `adam` makes as large a step of a change that is rounding alone as of any other.
NOT_LEFT_OUT = ("elastic", "streaming", "background", "background in parts", "adam")
LEAVE_OUT = [name for name in STRATEGIES if name not in NOT_LEFT_OUT]


def groups_of(replicas: int) -> st.SearchStrategy[int]:
    return st.sampled_from([size for size in range(1, replicas + 1) if replicas % size == 0])


@settings(max_examples=examples(8, 25), deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_is_that_of_full_copies(name: str, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 8), label="replicas")
    decays = data.draw(st.booleans(), label="the rate decays, in the third epoch")
    problem = Problem(
        replicas=replicas,
        count=data.draw(st.integers(8 * 4, 130), label="samples"),
        epochs=3 if decays else data.draw(st.integers(1, 3), label="epochs"),
        seed=data.draw(st.integers(0, 100), label="seed"),
        decays=decays,
    )
    period = data.draw(st.sampled_from([1, 2, 3, 5, "epoch", "2 per epoch", "3 per epoch"]), label="period")
    momentum = data.draw(st.sampled_from(["average", "reset", "local"]), label="momentum")
    keys = dict(STRATEGIES[name])
    if keys.get("strategy") == "hierarchical":
        keys["group"] = data.draw(groups_of(replicas), label="group")
    config = SyncConfig(period=period, momentum=momentum, **keys)
    deterministic = data.draw(st.booleans(), label="deterministic")
    dtype = torch.float64 if name == "adam" else torch.float32  # it divides by the size of changes, of which rounding is a part
    found, drifts = train(problem, config, deterministic=deterministic, dtype=dtype)
    expected, distances = reference(problem, config)
    assert torch.allclose(found[1:].double(), expected[1:], atol=2e-5, rtol=2e-5)
    assert drifts == pytest.approx(distances, rel=2e-3, abs=2e-4)


@settings(max_examples=examples(6, 12), deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", LEAVE_OUT)
def test_replicas_that_lost_their_numbers_are_left_out(name: str, data: st.DataObject) -> None:
    """One, several, whole groups, or all of them, after which nothing is a number any more."""
    replicas = data.draw(st.integers(2, 8), label="replicas")
    places = st.tuples(st.integers(0, replicas - 1), st.integers(0, 1), st.integers(0, 4))
    losses = data.draw(st.frozensets(places, min_size=1, max_size=replicas), label="replica, epoch and step of each loss")
    problem = Problem(replicas=replicas, count=130, losses=losses)
    keys = dict(STRATEGIES[name])
    if keys.get("strategy") == "hierarchical":
        keys["group"] = data.draw(groups_of(replicas), label="group")
    period = data.draw(st.sampled_from([1, 2, 3, "epoch"]), label="period")
    config = SyncConfig(period=period, momentum=data.draw(st.sampled_from(["average", "reset", "local"])), **keys)
    deterministic = data.draw(st.booleans(), label="deterministic")
    (found, drifts), (expected, distances) = train(problem, config, deterministic=deterministic), reference(problem, config)
    assert torch.allclose(found[2:].double(), expected[2:], atol=2e-5, rtol=2e-5, equal_nan=True)
    assert drifts == pytest.approx(distances, rel=2e-3, abs=2e-4, nan_ok=True)


@settings(max_examples=examples(7, 15), deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.sampled_from(["average", "local"]), st.integers(0, 100))
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_coded_is_that_of_full_copies(wire: str, replicas: int, epochs: int, momentum: str, seed: int) -> None:
    """To a few units of what a code can tell apart: a number at the middle between two codes may fall to either side."""
    problem = Problem(replicas=replicas, seed=seed, epochs=epochs)
    config = SyncConfig(momentum=momentum, wire=wire)
    (found, _), (expected, _) = train(problem, config), reference(problem, config)
    differs = (found - expected).abs()[1:]
    assert (differs > 2e-5).double().mean() < 0.02, "all but a few codes are the same"
    assert differs.max() < 0.05


@settings(max_examples=examples(8, 20), deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 2, 7]), st.integers(0, 1000))
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_nothing_is_lost_on_the_wire_for_good(wire: str, replicas: int, syncs: int, seed: int) -> None:
    """What was agreed, and what is still to be sent, is together the sum of all changes: error feedback."""
    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn(16 + 700, generator=generator)
    synced = SyncedSlice(agreed=arena, buffers=slice(0, 16), weights=slice(16, 716), own=slice(0, 716), request=0)
    make = partial(make_total, deterministic=False, zeros=own_zeros)
    agreement = Coded(synced, wires()[wire], make, replicas_per_rank=replicas, ranks=1)
    agreement.start()
    exact, coarse = arena[16:].double().clone(), 0.0
    for _ in range(syncs):
        for index in range(replicas):
            agreement.begin(index)
            change = torch.randn(700, generator=generator) * 10.0 ** torch.randint(-3, 2, (700,), generator=generator)
            arena[16:] += change
            exact += change.double() / replicas
            agreement.add(index, 1 / replicas)
        agreement.reach(SoloCommunicator(), request=0.0, rate=0.1)
        coarse = float((arena[16:].double() - exact).abs().max())
    state = agreement.state()
    waiting = state.shared["error"].double() + sum(error.double() for error in state.own["error"])
    assert torch.allclose(arena[16:].double() + waiting, exact, atol=1e-4)
    assert coarse > 1e-3, "which is not because nothing was rounded"


@pytest.mark.parametrize("name", [*(name for name in STRATEGIES if name not in RELATIVE), "bf16", "int8"])
def test_convergence_to_the_optimum_of_all(name: str) -> None:
    """Replicas whose own optima are far apart, with noise and a decaying rate, meet at that of the mean of all."""
    keys = dict(STRATEGIES.get(name, {"wire": name}))
    if keys.get("strategy") == "hierarchical":
        keys["group"] = 2
    problem = Problem(replicas=4, count=96, epochs=40, noise=0.3, rate=0.05, decays=True)
    start, optimum = problem.initial()[BUFFERS:][:600].double(), problem.optimum()
    found, drifts = train(problem, SyncConfig(period=2, **keys))
    distance = (found[BUFFERS:].double() - optimum).norm() / (start - optimum).norm()
    assert distance < 0.05, distance
    assert drifts[-1] < drifts[0] / 5


@pytest.mark.parametrize("name", RELATIVE)
def test_steps_of_a_length_of_their_own_come_close(name: str) -> None:
    problem = Problem(replicas=4, count=96, epochs=40, noise=0.3)
    start, optimum = problem.initial()[BUFFERS:][:600].double(), problem.optimum()
    found, _ = train(problem, SyncConfig(period=2, **STRATEGIES[name]))
    assert (found[BUFFERS:].double() - optimum).norm() < 0.25 * (start - optimum).norm()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_orthogonal(rows: int, columns: int, seed: int) -> None:
    """The same singular vectors, and singular values near 1, but for those that are a thousandth of the largest."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = orthogonal(matrix[None])[0]
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ found @ v.mT
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-6)
    large = inner.diagonal()[s > 0.01 * s.max()]
    assert ((large > 0.4) & (large < 1.4)).all()


@pytest.fixture(scope="module")
def on_ranks(ranks: RankPool) -> dict[str, dict[str, Any]]:
    """The ways of tests.sync.ranks: 8 replicas on 4 ranks of MPI and 2 of gloo; if all is tried, 2 and 4 of both, and 8."""
    places = examples((("mpi", 4), ("gloo", 2)), (("mpi", 4), ("gloo", 4), ("mpi", 2), ("gloo", 2)))
    found = {f"{kind}:{size}": ranks.run(train_ways, kind, 8, size=size)[0] for kind, size in places}
    if FULL:
        result = run_ranks(8, "-m", "tests.sync.ranks", "8")
        assert result.returncode == 0, result.stderr[-3000:]
        found["mpi:8"] = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    return found


@pytest.fixture(scope="module")
def one_each(ranks: RankPool) -> dict[str, dict[str, Any]]:
    """The same ways with 4 replicas, each of which has a rank of its own."""
    return {"mpi:4": ranks.run(train_ways, "mpi", 4, size=4)[0]}


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replicas", [8, 4])
def test_ranks_do_not_matter(way: str, replicas: int, request: pytest.FixtureRequest) -> None:
    """8 replicas on 1, 2, 4 and 8 ranks, and 4 on 1 and 4: to rounding; to the last bit if deterministic."""
    problem, config = of_replicas(WAYS[way], replicas)
    where_states: dict[str, dict[str, Any]] = request.getfixturevalue("on_ranks" if replicas == 8 else "one_each")
    for deterministic in (False, True):
        alone, _ = train(problem, config, deterministic=deterministic)
        for where, states in where_states.items():
            found = torch.tensor(states[f"{way} {deterministic}"])
            if deterministic:
                assert torch.equal(found[1:], alone[1:]), where
            else:
                close = (found - alone)[1:].abs() < 2e-5
                assert close.all() or (config.wire != "fp32" and close.double().mean() > 0.95), where


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"strategy": "elastic", "outer": "slowmo"}, "outer momentum steps"),
        ({"strategy": "gradients", "outer": "nesterov"}, "outer momentum steps"),
        ({"strategy": "streaming", "wire": "int8"}, "only weights and gradients are coded"),
        ({"strategy": "gradients", "period": "auto"}, "gradients are averaged at every step"),
        ({"parts": 0}, r"sync\.parts is 0"),
        ({"elasticity": 1.5}, r"sync\.elasticity is 1.5"),
        ({"tolerance": 0.0}, r"sync\.tolerance is 0.0"),
        ({"cost": -1.0}, r"sync\.cost is -1.0"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SyncConfig(**keys)


def test_groups_must_fit() -> None:
    with pytest.raises(AgreedError, match=r"sync\.group is 3, but there are 8 replicas"):
        train(Problem(replicas=8), SyncConfig(strategy="hierarchical", group=3))


def settled(load: float = 0.5, *, replicas: int = 64, steps: int = 16, **keys: Any) -> tuple[SyncConfig, str]:
    return settled_sync(SyncConfig(**{"strategy": "auto", **keys}), replicas=replicas, steps=steps, outer_steps=lambda: load)


def test_auto_with_few_steps_is_muon_at_each() -> None:
    found, reason = settled()
    assert found == SyncConfig(strategy="auto", period=1, outer="muon", outer_rate=0.04, momentum="reset")
    assert "16 steps in an epoch are few" in reason
    assert settled(steps=64)[0].outer_rate == 0.025, "shorter steps where there are more"
    assert settled(steps=4)[0].outer_rate == 0.04, "but never very long ones"
    assert settled(outer_rate=0.01)[0].outer_rate == 0.01
    assert settled(load=6.0)[0].outer == settled(load=1.9, steps=50)[0].outer == "muon", "the fewer steps, the more it saves"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"steps": 100}, "100 steps in an epoch are enough"),
        ({"replicas": 1}, "are enough"),
        ({"load": 6.1}, "Muon would take as long as 6.1 steps"),
        ({"load": 2.1, "steps": 50}, "Muon would take as long as 2.1 steps"),
    ],
)
def test_auto_otherwise_is_the_mean_with_a_measured_period(keys: dict[str, Any], why: str) -> None:
    found, reason = settled(**keys)
    assert found == SyncConfig(strategy="auto", period="auto")
    assert why in reason


def test_auto_leaves_what_was_asked_for() -> None:
    assert settled(period=4)[0] == SyncConfig(strategy="auto", period=4)
    assert settled(outer="slowmo")[0] == SyncConfig(strategy="auto", period="auto", outer="slowmo")
    assert settled(outer="muon", period=4)[0] == SyncConfig(strategy="auto", period=4, outer="muon")
    assert settled(strategy="elastic") == (SyncConfig(strategy="elastic"), "asked for")


@pytest.mark.parametrize(("steps", "rate"), [(16, 0.04), (400, 0.01), (1_000_000, 0.0002)])
@pytest.mark.parametrize("replicas", [1, 64])
def test_auto_is_muon_wherever_it_is_asked_for(replicas: int, steps: int, rate: float) -> None:
    found, reason = settled(load=100.0, replicas=replicas, steps=steps, outer="muon")
    assert found == SyncConfig(strategy="auto", period=1, outer="muon", outer_rate=rate, momentum="reset")
    assert reason == f"auto: Muon, which was asked for, at each of {steps} steps in an epoch"


@pytest.mark.parametrize(
    ("steps", "cost", "hides"),
    [(1000, 0.5, 0), (1000, 1.0, 0), (1000, 3.0, 1), (1000, 30.0, 1), (100, 30.0, 1), (100, 100.0, 0), (99, 10.0, 0)],
)
def test_auto_hides_syncs_where_that_is_clearly_faster(steps: int, cost: float, hides: bool) -> None:
    """Not where they take less than some steps, nor where the one at the end of an epoch, which cannot be hidden, is most of it.

    Nor where epochs are short: what was tried there came out in both ways.
    """
    found = timed(SyncConfig(strategy="auto", period="auto"), steps=steps, cost=cost, part=cost / 8)
    if not hides:
        assert found is None
        return
    assert found is not None
    assert found[0] == SyncConfig(strategy="background", period="auto")
    assert f"a sync takes {cost:.2g} steps, one of a part {cost / 8:.2g}" in found[1]


def test_auto_does_not_hide_syncs_of_parts_that_are_too_long_for_it() -> None:
    assert timed(SyncConfig(strategy="auto", period="auto"), steps=1000, cost=30.0, part=30.0) is None
    told = timed(SyncConfig(strategy="auto", cost=10.0), steps=1000, cost=10.0, part=1.25)
    assert told is not None
    assert told[0].cost == 1.25, "of a part from then on"


@pytest.mark.parametrize(
    ("keys", "left"), [({}, True), ({"period": 4}, False), ({"outer": "muon"}, False), ({"strategy": "weights"}, False)]
)
def test_what_auto_leaves_to_times(keys: dict[str, Any], left: bool) -> None:
    assert is_undecided(SyncConfig(**{"strategy": "auto", **keys})) == left


def test_operations_of_muon() -> None:
    assert muon_flops([(100,)]) == 0
    rounds = 2 * 8 * 27 * 8 + 2 * 8 * 8 * 8 + 2 * 8 * 8 * 27  # x xᵀ, its square, and that times x
    assert muon_flops([(8, 3, 3, 3)]) == muon_flops([(27, 8)]) == 5 * rounds


@pytest.mark.parametrize("kind", ["trust", "muon"])
def test_a_matrix_of_zeros_moves_as_one_that_torch_draws(kind: str) -> None:
    weights = torch.zeros(600)
    synced = SyncedSlice(
        agreed=weights, buffers=slice(0, 0), weights=slice(0, 600), own=slice(0, 600), request=0, matrices=MATRICES
    )
    step = make_outer(kind, synced, rate=0.1, momentum=0.9, peak=1.0)
    step.start(weights)
    step.move(weights, torch.ones(600), 1.0)
    assert weights[:200].norm() == pytest.approx(0.1 * (20 / 3) ** 0.5)
