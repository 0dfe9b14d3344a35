"""When replicas agree."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.errors import ConfigError
from deepex.sync import PeriodRule, Seen, parse_period, segments
from deepex.sync.auto import Auto

periods = st.one_of(
    st.integers(1, 40),
    st.just("epoch"),
    st.integers(1, 40).map(lambda k: f"{k} per epoch"),
    st.integers(1, 40).map("{}/epoch".format),
)


@given(periods, st.integers(1, 200), st.data())
def test_segments_cover_the_epoch_and_resume_anywhere(period: int | str, steps: int, data: st.DataObject) -> None:
    plan = segments(parse_period(period), 0, steps)
    assert plan[0][0] == 0
    assert plan[-1][1] == steps
    assert all(start < stop for start, stop in plan)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(plan))
    cut = data.draw(st.sampled_from(plan))[0]
    assert segments(parse_period(period), cut, steps) == [s for s in plan if s[0] >= cut], "resumed at a sync, the rest is the same"


@given(st.integers(1, 50), st.integers(1, 200))
def test_lengths(number: int, steps: int) -> None:
    fixed = segments(parse_period(number), 0, steps)
    assert all(stop - start == number for start, stop in fixed[:-1])
    assert fixed[-1][1] - fixed[-1][0] <= number
    parts = segments(parse_period(f"{number} per epoch"), 0, steps)
    assert len(parts) == min(number, steps)
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("period", [0, -3, "0 per epoch", "sometimes", "", True, 1.5, "1 until x then 3", "1 until 2 then 0"])
def test_nonsense(period: object) -> None:
    if period is True:
        assert parse_period(True) == parse_period(1), "TOML's true never gets here: the table refuses it"
        return
    with pytest.raises(ConfigError, match=r"sync\.period is"):
        parse_period(period)


def plan(rule: PeriodRule, epoch: int, steps: int, rate: float = 0.1) -> list[int]:
    rule.begin_epoch(epoch, lambda _step: rate)
    return [stop - start for start, stop in segments(rule, 0, steps)]


def seen(**keys: float) -> Seen:
    usual = {"epoch": 1, "loss": 1.0, "drift": 0.01, "step_seconds": 1.0, "sync_seconds": 0.1, "steps": 100, "syncs": 10}
    return Seen(**{**usual, **keys})


def test_post_local() -> None:
    rule = parse_period("1 until 2 then 8")
    assert plan(rule, 0, 20) == plan(rule, 1, 20) == [1] * 20
    assert plan(rule, 2, 20) == [8, 8, 4]
    assert plan(parse_period("4 until 1 epoch, then 2 per epoch"), 1, 20) == [10, 10]
    assert parse_period("2 until 1 then 8").longest(100) == 100


def test_adacomm_follows_the_root_of_the_loss() -> None:
    rule = parse_period("adacomm", base=16)
    assert plan(rule, 0, 40) == [16, 16, 8]
    rule.learn(seen(loss=2.0))
    assert plan(rule, 1, 40) == [16, 16, 8]
    rule.learn(seen(loss=0.5))
    assert plan(rule, 2, 40) == [8] * 5, "a quarter of the first loss, half the period"
    rule.learn(seen(loss=0.001))
    assert plan(rule, 3, 3) == [1, 1, 1]
    again = parse_period("adacomm", base=16)
    again.restore(json.loads(json.dumps(rule.state)))
    assert plan(again, 3, 3) == [1, 1, 1], "what a resumed run must know"
    assert "adacomm" in again.reason


def test_qsr_follows_the_rate() -> None:
    rule = parse_period("qsr", base=4, alpha=0.2)
    assert plan(rule, 0, 20, rate=0.1) == [4] * 5
    assert plan(rule, 0, 20, rate=0.05) == [16, 4]
    rule.begin_epoch(0, lambda step: 0.1 if step < 8 else 0.05)
    assert segments(rule, 0, 24) == [(0, 4), (4, 8), (8, 24)]
    assert segments(rule, 8, 24) == [(8, 24)], "resumed at a sync, the rest is the same"


def auto(**keys: Any) -> Auto:
    rule = parse_period("auto", **keys)
    assert isinstance(rule, Auto)
    return rule


def test_auto_keeps_communication_below_its_share() -> None:
    rule = auto(share=0.1)
    rule.measured(step_seconds=1.0, sync_seconds=1.0)
    assert plan(rule, 0, 18) == [9, 9], "9 steps and 1 sync: a tenth"
    assert "a sync takes 1 steps" in rule.reason
    rule.learn(seen(sync_seconds=3.0, drift=1.0))
    assert plan(rule, 1, 54) == [27, 27], "also where drift would have it shorter"


def test_auto_grows_while_drift_is_small_and_shrinks_when_it_grows() -> None:
    rule = auto(longest=64)
    lengths = []
    for _ in range(8):
        rule.learn(seen(drift=1e-5, sync_seconds=0.0, steps=64, syncs=64 // plan(rule, 0, 64)[0]))
        lengths.append(plan(rule, 0, 64)[0])
    assert lengths == [2, 4, 8, 16, 32, 64, 64, 64]
    rule.learn(seen(drift=1e-3, sync_seconds=0.0, steps=64, syncs=1))
    assert plan(rule, 0, 64)[0] == 32, "the guard"
    assert "drift grew" in rule.reason
    rule.learn(seen(drift=0.04, sync_seconds=0.0, steps=64, syncs=2))
    assert plan(rule, 0, 64)[0] <= 2, "H (tolerance / drift)²"


def test_auto_shortens_when_the_validation_gap_grows() -> None:
    rule = auto()
    keys = {"drift": 1e-5, "sync_seconds": 0.0, "steps": 64, "syncs": 4}
    rule.learn(seen(loss=1.0, validation_loss=1.1, **keys))
    rule.learn(seen(loss=1.0, validation_loss=1.1, **keys))
    before = plan(rule, 0, 64)[0]
    rule.learn(seen(loss=0.9, validation_loss=1.3, **keys))
    assert plan(rule, 0, 64)[0] <= max(before, 8)
    assert "gap grew" in rule.reason
    again = auto()
    again.restore(json.loads(json.dumps(rule.state)))
    assert (again.reason, plan(again, 0, 64)) == (rule.reason, plan(rule, 0, 64))


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(-5, 5)), max_size=6), st.integers(1, 300))
def test_auto_stays_within_its_bounds(epochs: list[tuple[float, float, float, float]], longest: int) -> None:
    rule = auto(longest=longest)
    for drift, step, sync, gap in epochs:
        rule.learn(seen(drift=drift, step_seconds=step, sync_seconds=sync, validation_loss=1.0 + gap))
        assert all(1 <= length <= longest for length in plan(rule, 0, 500))
