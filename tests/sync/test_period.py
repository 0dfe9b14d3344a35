"""When replicas agree."""

import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.errors import ConfigError
from deepex.sync.config import SyncConfig
from deepex.sync.when import read_period
from deepex.sync.when.auto import AutoPeriod
from deepex.sync.when.rule import PeriodRule, Seen, Situation, stretches


def parse_period(period: int | str, *, situation: Situation | None = None, **options: float) -> PeriodRule:
    return read_period(period, SyncConfig(**options), situation or Situation())


periods = st.one_of(
    st.integers(1, 40),
    st.just("epoch"),
    st.integers(1, 40).map(lambda k: f"{k} per epoch"),
    st.integers(1, 40).map("{}/epoch".format),
)


@given(periods, st.integers(1, 200), st.data())
def test_segments_cover_the_epoch_and_resume_anywhere(period: int | str, steps: int, data: st.DataObject) -> None:
    plan = stretches(parse_period(period), 0, steps)
    assert plan[0][0] == 0
    assert plan[-1][1] == steps
    assert all(start < stop for start, stop in plan)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(plan))
    cut = data.draw(st.sampled_from(plan))[0]
    assert stretches(parse_period(period), cut, steps) == [s for s in plan if s[0] >= cut], (
        "resumed at a sync, the rest is the same"
    )


def test_more_periods_than_steps_take_no_longer_to_plan() -> None:
    assert stretches(parse_period("999999999999999999 per epoch"), 0, 3) == [(0, 1), (1, 2), (2, 3)]


def test_a_rule_that_would_wait_for_ever_waits_for_the_end_of_the_epoch() -> None:
    qsr, adacomm = parse_period("qsr", alpha=1e300), parse_period("adacomm")
    qsr.begin_epoch(0, lambda _: 1e-300)
    for loss in (1e-320, 1e300):
        adacomm.learn(seen(loss=loss))
    for rule in (qsr, adacomm):
        assert stretches(rule, 0, 5) == [(0, 5)]
        assert rule.reason


@given(st.integers(1, 50), st.integers(1, 200))
def test_lengths(number: int, steps: int) -> None:
    fixed = stretches(parse_period(number), 0, steps)
    assert all(stop - start == number for start, stop in fixed[:-1])
    assert fixed[-1][1] - fixed[-1][0] <= number
    parts = stretches(parse_period(f"{number} per epoch"), 0, steps)
    assert len(parts) == min(number, steps)
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "period",
    [0, -3, "0 per epoch", "sometimes", "", True, 1.5, "1 until x then 3", "1 until 2 then 0", "9" * 5000, "9" * 19 + " per epoch"],
)
def test_nonsense(period: object) -> None:
    if period is True:
        assert parse_period(True) == parse_period(1), "TOML's true never gets here: the table refuses it"
        return
    with pytest.raises(ConfigError, match=r"sync\.period is"):
        parse_period(period)


def plan(rule: PeriodRule, epoch: int, steps: int, rate: float = 0.1) -> list[int]:
    rule.begin_epoch(epoch, lambda _step: rate)
    return [stop - start for start, stop in stretches(rule, 0, steps)]


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
    assert stretches(rule, 0, 24) == [(0, 4), (4, 8), (8, 24)]
    assert stretches(rule, 8, 24) == [(8, 24)], "resumed at a sync, the rest is the same"


def auto(**keys: Any) -> AutoPeriod:
    rule = parse_period("auto", **keys)
    assert isinstance(rule, AutoPeriod)
    return rule


def least_time(cost: float, drift: float, tolerance: float = 0.14, *, hides: bool = False) -> int:
    """The period of the least expected time, with what replicas drift in one step."""
    waits = {period: max(0, cost - period) + 0.15 * min(cost, period) if hides else cost for period in range(1, 257)}
    times = [(1 + wait / period) * (1 + (drift / tolerance) ** 2 * period**1.5) for period, wait in waits.items()]
    return times.index(min(times)) + 1


def period(rule: AutoPeriod) -> int:
    return int(rule.state["period"])


def test_auto_cuts_an_epoch_evenly() -> None:
    rule = auto(longest=40)
    rule.restore({"period": 22})
    assert plan(rule, 0, 47) == [24, 23], "and not 22, 22, 3"
    assert plan(rule, 0, 5) == [5]
    rule.restore({"period": 40})
    assert plan(rule, 0, 50) == [25, 25], "none is longer than the longest"


def learnt(rule: AutoPeriod, drift: float, cost: float, lost: int = 0) -> int:
    """The period after an epoch with the one that the rule had, and replicas that drift so much in one step."""
    had = period(rule)
    rule.learn(seen(drift=drift * had**0.75, sync_seconds=cost, steps=1000, syncs=1000 / had, lost=lost))
    return period(rule)


@pytest.mark.parametrize(("cost", "drift"), [(0.1, 0.01), (1.0, 0.01), (10.0, 0.01), (10.0, 0.002), (10.0, 0.1), (100.0, 0.02)])
def test_auto_comes_to_the_period_of_the_least_expected_time(cost: float, drift: float) -> None:
    rule = auto()
    rule.measured(cost)
    assert period(rule) == least_time(cost, 0.0125), "drift is not known yet"
    assert f"a sync took {cost:.2g} steps" in rule.reason
    for _ in range(4):
        found = learnt(rule, drift, cost)
    assert found == least_time(cost, drift)
    assert f"a sync takes {cost:.2g} steps and drift in {found} steps is" in rule.reason


def test_auto_with_a_cost_that_is_given_looks_at_no_clock() -> None:
    rule = auto(cost=10.0)
    assert not rule.wants_times
    assert auto().wants_times
    assert period(rule) == least_time(10.0, 0.0125)
    rule.learn(seen(drift=0.01, step_seconds=0.0, sync_seconds=0.0, steps=100, syncs=100))
    assert "a sync takes 10 steps" in rule.reason
    blind = auto()
    blind.learn(seen(drift=0.01, step_seconds=0.0, sync_seconds=0.0))
    assert plan(blind, 0, 3) == [1, 1, 1]
    assert "times are not looked at" in blind.reason


def rest_of(rule: PeriodRule, step: int) -> list[int]:
    """The lengths of the stretches from a step on, of an epoch of 126."""
    return [stop - start for start, stop in stretches(rule, step, 126)]


@pytest.mark.parametrize(("drift", "expected"), [(0.1, 2), (0.0125, 14), (0.001, 56)])
def test_auto_plans_the_rest_of_the_first_epoch_by_the_drift_of_its_first_stretch(drift: float, expected: int) -> None:
    rule = auto(cost=10.0)
    assert (rule.wants_look, period(rule)) == (True, 14)
    rule.look(drift * 14**0.75, 14)
    assert not rule.wants_look
    assert period(rule) == expected == min(least_time(10.0, drift), 4 * 14)
    assert rule.reason.startswith("auto: 14, because sync.cost says")
    assert f"; after 14 steps {expected}, because drift in them was {drift * 14**0.75:.2g} of the weights" in rule.reason
    rest = rest_of(rule, 14)
    assert sum(rest) == 112
    assert max(rest) - min(rest) <= 1, "the rest is cut evenly"
    assert abs(max(rest) - expected) <= 1
    again = auto(cost=10.0)
    again.restore(json.loads(json.dumps(rule.state)))
    assert not again.wants_look
    assert rest_of(again, 14 + rest[0]) == rest[1:], "as in the run that was not resumed"
    rule.learn(seen(drift=drift * expected**0.75, sync_seconds=10.0, steps=126, syncs=1 + 112 // expected))
    assert period(rule) == least_time(10.0, drift), "drift is of the stretches after the look"
    whole = plan(rule, 1, 126)
    assert (sum(whole), max(whole) - min(whole) <= 1) == (126, True), "later epochs are planned whole"


def test_auto_looks_at_replicas_that_have_met() -> None:
    """In the background the first mean comes later than the first sync, and no drift has been seen."""
    rule = auto(cost=10.0)
    before = plan(rule, 0, 126)
    rule.look(0.0, before[0])
    assert (rule.wants_look, rest_of(rule, before[0])) == (True, before[1:]), "after the next stretch"
    again = auto(cost=10.0)
    again.restore(json.loads(json.dumps(rule.state)))
    assert again.wants_look
    rule.look(0.1, sum(before[:2]))
    assert not rule.wants_look
    assert rest_of(rule, sum(before[:2])) != before[2:]
    waits = parse_period("1 until 2 then auto", cost=10.0)
    waits.begin_epoch(0, lambda _step: 0.1)
    assert not waits.wants_look
    waits.learn(seen(drift=0.01))
    waits.begin_epoch(2, lambda _step: 0.1)
    assert not waits.wants_look, "drift has been seen"
    hurries = parse_period("auto until 2 then 1", cost=10.0)
    hurries.begin_epoch(0, lambda _step: 0.1)
    assert hurries.wants_look
    hurries.look(0.1 * 14**0.75, 14)
    assert rest_of(hurries, 14) == [2] * 56


@pytest.mark.parametrize(("strategy", "age"), [("weights", 1), ("elastic", 1), ("streaming", 3), ("background", 6)])
def test_auto_syncs_the_sooner_the_older_a_mean_is(strategy: str, age: int) -> None:
    """Until it has seen drift at syncs of this kind."""
    rule = SyncConfig(strategy=strategy, period="auto", parts=3, cost=10.0).rule()
    first, hides = period(rule), strategy == "background"
    assert first == least_time(10.0, 0.0125 * age**0.75, hides=hides)
    again = copy.deepcopy(rule)
    again.look(0.01, 8)
    assert period(again) == first if age > 1 else period(again) > first, "little drift at first is no reason to sync less"
    rule.look(0.1, 8)
    assert period(rule) == least_time(10.0, 0.1 / 8**0.75 * age**0.75, hides=hides)
    rule.learn(seen(drift=0.15, steps=80, syncs=10, sync_seconds=10.0))
    assert period(rule) == least_time(10.0, 0.15 / 8**0.75, hides=hides), "which has its age in itself"


def test_auto_takes_a_period_that_hides_a_sync_in_the_background() -> None:
    """The shortest; a longer one where drift is small, since some of it shows; a shorter one where drift is large.

    That nobody waits then does not mean that a sync takes no time; after a resume neither.
    """
    rule, again, wild = (SyncConfig(strategy="background", period="auto").rule() for _ in range(3))
    rule.measured(4.0)
    for one in (again, wild):
        one.restore(json.loads(json.dumps(rule.state)))
    for one in (rule, again):
        assert [learnt(one, 0.02, cost=0.01) for _ in range(3)] == [4, 4, 4]
    assert learnt(again, 0.005, cost=0.01) == least_time(4.0, 0.005, hides=True) > 4
    assert learnt(wild, 0.1, cost=0.01) == least_time(4.0, 0.1, hides=True) < 4


def test_auto_hears_of_a_sync_in_the_background_that_is_longer_than_it_was_when_tried() -> None:
    """From what is waited for it, if that is much, and not of the sync at the end of an epoch."""
    rule = SyncConfig(strategy="background", period="auto").rule()
    rule.measured(0.5)
    assert period(rule) == 1
    rule.learn(seen(drift=0.02, step_seconds=1.0, sync_seconds=0.4, steps=1000, syncs=1000))
    assert rule.state["first_cost"] == 0.5
    rule.learn(seen(drift=0.02, step_seconds=1.0, sync_seconds=3.0, steps=10, syncs=10))
    assert rule.state["first_cost"] == 0.5, "few syncs"
    rule.learn(seen(drift=0.02, step_seconds=1.0, sync_seconds=3.0, steps=1000, syncs=1000))
    assert rule.state["first_cost"] == 4.0
    assert "a sync takes 4 steps" in rule.reason
    assert period(rule) == least_time(4.0, 0.02, hides=True)


def test_auto_plans_when_all_groups_meet_and_cuts_that_for_those_of_a_group() -> None:
    rule = SyncConfig(strategy="hierarchical", period="auto", between=2, cost=10.0).rule()
    cut, all_parts = (len(plan(rule, 0, 130)) for rule in (rule, auto(cost=10.0)))
    assert cut == 2 * all_parts


def test_auto_lets_a_tolerance_decide_how_much_drift_is_much() -> None:
    assert period(auto(cost=10.0, tolerance=0.03)) == least_time(10.0, 0.0125, 0.03) < least_time(10.0, 0.0125)


def test_auto_grows_no_faster_than_fourfold() -> None:
    rule = auto(longest=64)
    assert [learnt(rule, 1e-6, 100.0) for _ in range(4)] == [4, 16, 64, 64]


def test_auto_halves_the_period_when_a_replica_was_lost() -> None:
    rule = auto(cost=1e4)
    for _ in range(4):
        before = learnt(rule, 0.01, 1e4)
    assert learnt(rule, 0.01, 1e4, lost=1) == before // 2
    assert rule.reason.endswith("; a replica was lost, so the period is halved")
    assert learnt(rule, 0.01, 1e4) == before, "and it grows again"


def test_auto_halves_the_period_when_drift_grows() -> None:
    rule = auto(cost=1e4)
    for _ in range(4):
        before = learnt(rule, 0.01, 1e4)
    assert before == least_time(1e4, 0.01)
    assert learnt(rule, 0.016, 1e4) == before // 2 < least_time(1e4, 0.016)
    assert "; drift grew, so the period is halved" in rule.reason
    assert learnt(rule, 0.016, 1e4) == least_time(1e4, 0.016), "and it may grow again"
    assert learnt(rule, 0.016 * 1.4, 1e4) == least_time(1e4, 0.016 * 1.4), "a little more is no alarm"
    assert "grew" not in rule.reason


def test_auto_does_not_mind_drift_that_grows_but_is_small() -> None:
    rule = auto(cost=1.0)
    for drift in (1e-5, 1e-4, 1e-3):
        rule.learn(seen(drift=drift, steps=64, syncs=1))
        assert "grew" not in rule.reason
    rule.learn(seen(drift=0.036, steps=64, syncs=1))
    assert "drift grew" in rule.reason


def test_auto_halves_the_period_when_the_gap_to_validation_grows() -> None:
    rule = auto(cost=10.0)
    keys = {"drift": 0.01, "steps": 64, "syncs": 4}
    for gap in (0.1, 0.1, 0.3, 0.4, -0.5):  # by less than a quarter of the loss each time, or not at all
        rule.learn(seen(loss=1.0, validation_loss=1.0 + gap, **keys))
        assert "grew" not in rule.reason
    before = period(rule)
    rule.learn(seen(loss=1.0, validation_loss=1.3, **keys))
    assert period(rule) == min(before, 64) // 2
    assert "; the gap to validation grew" in rule.reason
    again = auto(cost=10.0)
    again.restore(json.loads(json.dumps(rule.state)))
    assert (again.reason, plan(again, 0, 64)) == (rule.reason, plan(rule, 0, 64))
    for one in (rule, again):
        one.learn(seen(loss=1.0, validation_loss=1.5, **keys))
    assert (again.reason, plan(again, 0, 64)) == (rule.reason, plan(rule, 0, 64)), "what came before is known too"


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(-5, 5)), max_size=6), st.integers(1, 300))
def test_auto_stays_within_its_bounds(epochs: list[tuple[float, float, float, float]], longest: int) -> None:
    rule = auto(longest=longest)
    for drift, step, sync, gap in epochs:
        rule.learn(seen(drift=drift, step_seconds=step, sync_seconds=sync, validation_loss=1.0 + gap))
        assert all(1 <= length <= longest for length in plan(rule, 0, 500))
