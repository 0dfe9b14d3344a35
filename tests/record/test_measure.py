"""Measures as data: their values from sums, their texts, and which is better."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.record.measure import EARLIER, LOSS, Measure


@given(st.floats(0, 1e9), st.integers(1, 10**9))
def test_a_value_is_the_mean_or_its_root(total: float, samples: int) -> None:
    assert Measure(name="error").value(total, samples) == total / samples
    assert Measure(name="rmse", form="root").value(total, samples) == math.sqrt(total / samples)


@pytest.mark.parametrize(
    ("measure", "value", "text"),
    [
        (EARLIER["error"], 0.12345, "12.35%" if round(12.345, 2) == 12.35 else "12.34%"),
        (EARLIER["rmse"], 0.123456, "0.1235"),
        (Measure(name="height", unit="m"), 2.5, "2.5000 m"),
        (LOSS, -1.0, "-1.0000"),
    ],
)
def test_a_value_has_its_unit(measure: Measure, value: float, text: str) -> None:
    assert measure.text(value) == text


def test_better_is_lower_unless_it_says_so() -> None:
    assert Measure(name="error").best([0.3, 0.1, 0.2]) == 0.1
    assert Measure(name="iou", better="higher").best([0.3, 0.1, 0.2]) == 0.3


def test_a_measure_is_called_by_its_label_in_sentences() -> None:
    assert (EARLIER["error"].title, EARLIER["rmse"].title) == ("error", "RMSE")
