import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.speedup.statistics import Interval, middle, ratio, verdict
from tests.full import examples

TRIALS = examples(40, 150)
TIMES = st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=5), min_size=1, max_size=5)


@given(TIMES)
def test_the_middle_lies_within_its_interval_and_the_values(groups: list[list[float]]) -> None:
    found = middle(groups)
    values = [value for group in groups for value in group]
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert found.repeats == len(groups)


@given(TIMES, TIMES)
def test_a_ratio_the_other_way_round_is_its_inverse(base: list[list[float]], groups: list[list[float]]) -> None:
    there, back = ratio(base, groups), ratio(groups, base)
    assert there.value == pytest.approx(1 / back.value)
    assert there.low <= there.value <= there.high


def test_equal_times_have_no_width() -> None:
    assert ratio([[2.0], [2.0]], [[1.0], [1.0]]) == Interval(value=2.0, low=2.0, high=2.0, repeats=2)


def _runs(chance: random.Random, mean: float, *, between: float, within: float) -> list[list[float]]:
    """Three repeats of five epochs: repeats differ, and epochs within them."""
    return [[own * chance.gauss(1, within) for _ in range(5)] for own in (mean * chance.gauss(1, between) for _ in range(3))]


def test_without_a_difference_a_verdict_is_rare() -> None:
    """Drawn with a difference from run to run that epochs alone would not show: an interval over epochs would claim one mostly."""
    chance, claimed, by_epochs = random.Random(1), 0, 0
    for _ in range(TRIALS):
        one, other = (_runs(chance, 10, between=0.05, within=0.005) for _ in range(2))
        claimed += "no difference" not in verdict(ratio(one, other))
        flat = [[[value for group in groups for value in group]] for groups in (one, other)]
        by_epochs += "no difference" not in verdict(ratio(*flat))
    assert claimed / TRIALS < 0.25, "three repeats are few, and the bootstrap knows no more than they do"
    assert by_epochs > 1.5 * claimed


def test_a_difference_that_is_there_is_shown() -> None:
    chance, shown = random.Random(2), 0
    for _ in range(TRIALS):
        slow, fast = (_runs(chance, mean, between=0.02, within=0.01) for mean in (12, 10))
        shown += verdict(ratio(slow, fast)).startswith("faster")
    assert shown > 0.95 * TRIALS


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((1.25, 1.2, 1.3), "faster by 25 % (20 % to 30 %)"),
        ((0.8, 0.75, 0.9), "slower by 25 % (11.1 % to 33.3 %)"),
        ((1.1, 0.9, 1.3), "no difference shown (ratio 0.9 to 1.3)"),
        ((4.0, 3.5, 4.2), "faster by a factor of 4 (3.5 to 4.2)"),
        ((0.25, 0.2, 0.5), "slower by a factor of 4 (2 to 5)"),
    ],
)
def test_verdicts(interval: tuple[float, float, float], text: str) -> None:
    value, low, high = interval
    assert verdict(Interval(value=value, low=low, high=high, repeats=3)) == text


def test_the_middle_is_that_of_repeats() -> None:
    groups = [[1.0], [2.0, 2.0, 2.0, 2.0], [3.0]]
    assert middle(groups).value == statistics.median([1, 2, 3])


def test_one_value_on_each_side_is_no_evidence() -> None:
    assert verdict(ratio([[2.0]], [[1.0]])) == "no evidence: one value each"
    assert verdict(ratio([[2.0], [2.0]], [[1.0], [1.0]])).startswith("faster")
