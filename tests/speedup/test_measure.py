"""The paper's definitions: S_p = t_s / t_p, efficiency = S_p / p, S_L = (t_s · N_s) / (t_p · N_p)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.errors import RunError
from deepex.record import PHASES, EpochRecord, Score, Target
from deepex.speedup import Speedup, compare, epoch_seconds
from tests.full import examples

ERROR = Target("train", "error", 0.2)


def epoch(number: int, seconds: float, error: float = 0.5, ranks: int = 1, **changes: Any) -> EpochRecord:
    values: dict[str, Any] = {
        "samples": 1000,
        "steps": 10,
        "syncs": 1,
        "rate": 0.1,
        "train": Score(loss=1.0, samples=1000, measures={"error": error}),
        "phases": {name: [seconds / len(PHASES)] * ranks for name in PHASES},
        "wall": [seconds] * ranks,
    }
    return EpochRecord(epoch=number, seconds=seconds, **(values | changes))


def run_of(seconds: Sequence[float], errors: Sequence[float], ranks: int = 1, **changes: Any) -> list[EpochRecord]:
    return [
        epoch(number, time, error, ranks, **changes)
        for number, (time, error) in enumerate(zip(seconds, errors, strict=True), start=1)
    ]


# Worked by hand. The serial run: epochs of 40 s after a first of 50, and it reaches error 0.2 in epoch 3.
# Four ranks: epochs of 12.5 s after a first of 30, and they reach it in epoch 4.
BASE = run_of([50.0, 40.0, 40.0, 40.0], [0.6, 0.4, 0.2, 0.1])
FOUR = run_of([30.0, 12.5, 12.5, 12.5, 12.5], [0.7, 0.5, 0.3, 0.2, 0.15], ranks=4)


def test_the_speedup_of_an_epoch() -> None:
    speedup = compare(BASE, FOUR)
    assert (speedup.base_epoch_seconds, speedup.epoch_seconds) == (40.0, 12.5)
    assert (speedup.base_ranks, speedup.ranks) == (1, 4)
    assert speedup.per_epoch == 3.2  # S_p = 40 / 12.5
    assert speedup.efficiency == 0.8  # 3.2 / 4
    assert speedup.measured


def test_the_learning_speedup() -> None:
    speedup = compare(BASE, FOUR, ERROR)
    assert (speedup.base_epochs, speedup.epochs) == (3, 4)
    assert speedup.learning == pytest.approx(2.4)  # S_L = (40 · 3) / (12.5 · 4) = 120 / 50
    assert speedup.target == "train error <= 0.2"


def test_a_base_of_several_ranks_is_not_taken_for_one() -> None:
    """From 2 to 8 ranks the ideal is 4: 40 s to 12.5 s is S_p = 3.2, efficiency 3.2 / 4 = 0.8."""
    base = run_of([40.0, 40.0], [0.5, 0.5], ranks=2)
    run = run_of([12.5, 12.5], [0.5, 0.5], ranks=8)
    assert compare(base, run).efficiency == 0.8


def test_learning_may_be_lost_where_time_is_won() -> None:
    """Twice as fast, three times the epochs: S_p = 2, S_L = 2 · 1/3 < 1."""
    base = run_of([10.0, 10.0], [0.2, 0.1])
    run = run_of([5.0, 5.0, 5.0], [0.4, 0.3, 0.2], ranks=2)
    assert compare(base, run, ERROR).per_epoch == 2.0
    assert compare(base, run, ERROR).learning == pytest.approx(2 / 3)


# What counts as the time of an epoch


def test_the_first_epoch_warms_up_and_is_left_out() -> None:
    assert epoch_seconds(run_of([100.0, 4.0, 6.0], [0.5] * 3)) == 5.0  # the median of 4 and 6


def test_a_run_of_one_epoch_has_its_time() -> None:
    assert epoch_seconds([epoch(1, 7.0)]) == 7.0


def test_the_median_is_not_moved_by_one_slow_epoch() -> None:
    assert epoch_seconds(run_of([9.0, 4.0, 5.0, 600.0], [0.5] * 4)) == 5.0


def test_partial_epochs_are_left_out() -> None:
    """Resumed in the middle of epoch 3: its 1 s is the time of a part."""
    epochs = run_of([9.0, 4.0, 1.0, 6.0], [0.5] * 4)
    epochs[2] = replace(epochs[2], partial=True)
    assert epoch_seconds(epochs) == 5.0


def test_the_first_epoch_counts_where_all_others_are_partial() -> None:
    assert epoch_seconds([epoch(1, 9.0), epoch(2, 1.0, partial=True)]) == 9.0


def test_a_resumed_record_without_its_first_epoch() -> None:
    assert epoch_seconds([epoch(4, 3.0), epoch(5, 5.0)]) == 4.0


@pytest.mark.parametrize("epochs", [[], [epoch(1, 1.0, partial=True)]], ids=["none", "partial"])
def test_without_a_whole_epoch_there_is_no_time(epochs: list[EpochRecord]) -> None:
    with pytest.raises(RunError, match="no whole epoch yet"):
        epoch_seconds(epochs)
    with pytest.raises(RunError, match="no whole epoch yet"):
        compare(BASE, epochs)
    with pytest.raises(RunError, match="no whole epoch yet"):
        compare(epochs, BASE)


def test_a_partial_epoch_that_reached_the_target_still_counts_as_an_epoch() -> None:
    """Its time is not whole, its learning is."""
    run = run_of([9.0, 4.0, 1.0, 4.0], [0.5, 0.4, 0.2, 0.1])
    run[2] = replace(run[2], partial=True)
    assert compare(BASE, run, ERROR).epochs == 3


# What is not known is not made up


def test_without_a_target_there_is_no_learning_speedup() -> None:
    speedup = compare(BASE, FOUR)
    assert (speedup.target, speedup.base_epochs, speedup.epochs, speedup.learning) == (None, None, None, None)


@pytest.mark.parametrize("swap", [False, True])
def test_a_target_that_one_run_did_not_reach_gives_none(swap: bool) -> None:
    never = run_of([1.0, 1.0], [0.9, 0.8])
    speedup = compare(never, BASE, ERROR) if swap else compare(BASE, never, ERROR)
    assert speedup.learning is None
    assert speedup.per_epoch > 0
    assert {speedup.base_epochs, speedup.epochs} == {None, 3}
    assert speedup.target == "train error <= 0.2"


@pytest.mark.parametrize("which", ["base", "run"])
def test_one_predicted_epoch_makes_the_comparison_predicted(which: str) -> None:
    predicted = [*FOUR[:-1], replace(FOUR[-1], measured=False)]
    speedup = compare(predicted, BASE) if which == "base" else compare(BASE, predicted)
    assert not speedup.measured


# Properties

few = settings(max_examples=examples(12, 50))
times = st.floats(1e-3, 1e5)
fractions = st.floats(0, 1)


@st.composite
def runs(draw: st.DrawFn) -> list[EpochRecord]:
    size = draw(st.integers(1, 6))
    each = st.lists(times, min_size=size, max_size=size)
    return run_of(draw(each), draw(st.lists(fractions, min_size=size, max_size=size)), ranks=draw(st.integers(1, 8)))


def scaled(epochs: list[EpochRecord], factor: float) -> list[EpochRecord]:
    return [replace(record, seconds=record.seconds * factor) for record in epochs]


def ratios(speedup: Speedup) -> tuple[float, ...]:
    return (speedup.per_epoch, speedup.efficiency, speedup.learning or 0.0)


@few
@given(runs(), fractions)
def test_a_run_against_itself_gains_nothing(run: list[EpochRecord], value: float) -> None:
    speedup = compare(run, run, Target("train", "error", value))
    assert speedup.per_epoch == 1.0
    assert speedup.efficiency == 1.0
    assert speedup.learning in (None, 1.0)
    assert (speedup.learning is None) == all(record.train.get("error") > value for record in run)  # type: ignore[operator]


@few
@given(runs(), runs(), fractions, st.floats(1e-3, 1e3))
def test_another_unit_of_time_changes_no_ratio(
    base: list[EpochRecord], run: list[EpochRecord], value: float, factor: float
) -> None:
    target = Target("train", "error", value)
    there = ratios(compare(scaled(base, factor), scaled(run, factor), target))
    assert there == pytest.approx(ratios(compare(base, run, target)), rel=1e-12)


@few
@given(runs(), runs(), fractions)
def test_learning_speedup_is_speedup_times_the_ratio_of_epochs(
    base: list[EpochRecord], run: list[EpochRecord], value: float
) -> None:
    speedup = compare(base, run, Target("train", "error", value))
    if speedup.base_epochs is None or speedup.epochs is None:
        assert speedup.learning is None
        return
    assert speedup.learning == pytest.approx(speedup.per_epoch * speedup.base_epochs / speedup.epochs)
    assert speedup.learning == pytest.approx(
        (speedup.base_epoch_seconds * speedup.base_epochs) / (speedup.epoch_seconds * speedup.epochs)
    )


@few
@given(runs(), runs())
def test_there_and_back_is_one(base: list[EpochRecord], run: list[EpochRecord]) -> None:
    there, back = compare(base, run), compare(run, base)
    assert there.per_epoch * back.per_epoch == pytest.approx(1.0)
    assert there.efficiency * back.efficiency == pytest.approx(1.0)


@few
@given(runs(), st.floats(1.001, 1e3))
def test_a_slower_run_gains_less(run: list[EpochRecord], factor: float) -> None:
    assert compare(run, scaled(run, factor)).per_epoch < 1.0
