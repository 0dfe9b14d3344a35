"""When replicas agree."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.errors import ConfigError
from deepex.sync import parse_period, segments

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


@pytest.mark.parametrize("period", [0, -3, "0 per epoch", "sometimes", "", True, 1.5])
def test_nonsense(period: object) -> None:
    if period is True:
        assert parse_period(True) == parse_period(1), "TOML's true never gets here: the table refuses it"
        return
    with pytest.raises(ConfigError, match=r"sync\.period is"):
        parse_period(period)
