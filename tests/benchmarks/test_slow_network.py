"""What the benchmark of the slow network computes from its runs; the runs themselves need root and minutes."""

import pytest

import slow_network
from deepex.sync.config import SyncConfig
from slow_network import Plan, Run


def make_run(strategy: str, seed: int, blocked: list[float], seconds: list[float], error: float = 0.2) -> Run:
    return Run(
        chosen="asked for",
        strategy=strategy,
        seed=seed,
        samples=6000,
        syncs=10,
        sync_bytes=8,
        blocked_seconds=blocked,
        epoch_seconds=seconds,
        step_seconds=[0.01],
        loss=0.5,
        error=error,
    )


def test_network_has_the_size_that_it_tells():
    network = slow_network.network(channels=1, size=(28, 28), classes=10)
    assert f"{sum(weight.numel() for weight in network.parameters()):,} parameters" in slow_network.network.__doc__


def test_a_period_computes_for_longer_than_a_sync():
    plan = Plan(step_seconds=0.02, sync_seconds=0.1, ideal_seconds=0.09, sync_bytes=8)
    assert plan.period == 16, "a multiple of the parts"
    assert set(slow_network.PARTS.values()) == {SyncConfig().parts}
    assert plan.period * plan.step_seconds >= 2.5 * plan.sync_seconds


def test_hidden_is_what_no_longer_blocks_and_saved_what_the_wall_clock_gained():
    pairs = [[make_run("weights", s, [2.0, 2.0], [6.0, 6.0]), make_run("other", s, [0.2, 0.2], [4.4, 4.4])] for s in (1, 2, 3)]
    found = slow_network.summarise(pairs)
    assert found["hidden"]["share"] == pytest.approx(0.9)
    assert found["saved"] == pytest.approx(0.8)
    assert found["blocked_seconds_per_sync"] == pytest.approx([0.2, 0.02])


@pytest.mark.parametrize(("weights_bytes", "best"), [(8, 0.9), (4, 0.95)])
def test_at_best_all_but_the_last_weights_of_an_epoch_are_hidden(weights_bytes, best):
    """Of 10 syncs; momentum that makes up half of a sync can be, also of the last."""
    assert slow_network.at_best(vars(make_run("weights", 1, [1.0], [1.0])), weights_bytes) == pytest.approx(best)


def test_difference_is_taken_seed_by_seed():
    pairs = [
        [make_run("weights", s, [1.0], [1.0], error=0.1 * s), make_run("other", s, [1.0], [1.0], error=0.1 * s + more)]
        for s, more in ((1, 0.01), (2, 0.02), (3, 0.03))
    ]
    found = slow_network.difference(pairs, "error")
    assert found["mean"] == pytest.approx(0.02)
    assert found["high"] - found["mean"] == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert slow_network.difference(pairs[:1], "error")["low"] is None


def test_in_the_same_time_the_faster_has_more_epochs():
    pairs = [[make_run("weights", s, [2.0], [30.0]), make_run("other", s, [0.2], [22.5], error=0.3)] for s in (1, 2)]
    assert slow_network.epochs_in_time(pairs, epochs=3) == 4
    timed = [[base, make_run("other", base.seed, [0.2], [23.0], error=0.15)] for base, _ in pairs]
    found = slow_network.same_time(pairs, timed, epochs=3)
    assert found["epochs"] == [3, 4]
    assert found["seconds"] == [90.0, 92.0]
    assert found["error"]["mean"] == pytest.approx(-0.05)


def test_a_strategy_that_is_no_faster_is_not_run_again(tmp_path):
    pairs = [[make_run("weights", 1, [2.0], [30.0]), make_run("other", 1, [0.2], [28.0])]]
    assert slow_network.in_the_same_time(pairs, 2, "1mbit", 4, tmp_path, epochs=3, data="none") == pairs
