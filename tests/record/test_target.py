import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.errors import ConfigError
from deepex.record import PHASES, EpochRecord, Score, Target
from deepex.record.measure import EARLIER, Measure


def make_score(values: dict[str, float], samples: int) -> Score:
    rest = {name: value for name, value in values.items() if name != "loss"}
    return Score(loss=values.get("loss", 1.0), samples=samples, measures=rest)


def make_epoch(number: int, train: dict[str, Any], validation: dict[str, Any] | None = None) -> EpochRecord:
    return EpochRecord(
        epoch=number,
        samples=10,
        steps=1,
        syncs=1,
        rate=0.1,
        train=make_score(train, 10),
        validation=None if validation is None else make_score(validation, 5),
        seconds=1.0,
        phases={name: [0.2] for name in PHASES},
        wall=[1.0],
    )


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("validation error <= 0.1", Target("validation", "error", 0.1)),
        ("train rmse <= 0.02", Target("train", "rmse", 0.02)),
        ("error <= 0.2", Target("train", "error", 0.2)),  # without a part: the training part, as in the paper
        ("loss<=1.5", Target("train", "loss", 1.5)),
        ("error < 0.2", Target("train", "error", 0.2)),
        ("error = 0.2", Target("train", "error", 0.2)),
        ("error: 0.2", Target("train", "error", 0.2)),
        ("error 0.2", Target("train", "error", 0.2)),
        ("  validation   loss   <=   1e-3  ", Target("validation", "loss", 1e-3)),
        ("loss <= -2.5E+1", Target("train", "loss", -25.0)),
        ("error <= .5", Target("train", "error", 0.5)),
        ("error <= 0", Target("train", "error", 0.0)),
    ],
)
def test_a_target_is_read_as_a_person_writes_it(text: str, target: Target) -> None:
    assert Target.parse(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.1",
        "error",
        "error <=",
        "error <= ten",
        "error <= 10%",
        "error <= 1e",
        "error <= 1-1",
        "error <= nan",
        "loss <= 1e999",
        "error <= 0.1 and loss <= 2",
        "test error <= 0.1",
        "error0.1",
    ],
)
def test_what_is_no_target_is_shown_with_the_rule_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)
    assert "[train|validation] MEASURE <= NUMBER" in str(caught.value)
    assert "'validation error <= 0.1'" in str(caught.value)


@pytest.mark.parametrize("text", ["error <= -1", "validation rmse <= -1e-9"])
def test_what_no_run_can_reach_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"but (error|rmse) is never below 0"):
        Target.parse(text).check(list(EARLIER.values()), "some")


@pytest.mark.parametrize("text", ["accuracy <= 0.1", "validationerror <= 0.1", "Error <= 0.1"])
def test_a_measure_that_the_task_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="but the task classify measures loss and error"):
        Target.parse(text).check([EARLIER["error"]], "classify")


@pytest.mark.parametrize(
    ("text", "better", "sign"),
    [("iou <= 0.8", "higher", ">="), ("validation loss >= 1", "higher", "<="), ("iou = 0.8", "higher", ">=")],
)
def test_a_target_is_on_the_side_where_its_measure_is_better(text: str, better: str, sign: str) -> None:
    with pytest.raises(ConfigError, match=f"write {sign}"):
        Target.parse(text).check([Measure(name=text.split(maxsplit=1)[0], better=better)], "some")


def test_a_measure_that_should_be_high_is_reached_from_below() -> None:
    target = Target.parse("validation iou >= 0.8")
    target.check([Measure(name="iou", better="higher", least=None)], "segment")
    records = [make_epoch(n, {}, {"iou": value}) for n, value in enumerate((0.2, 0.79, 0.8, 0.7), start=1)]
    assert target.epochs(records) == 3
    assert Target.parse(str(target)) == target


@given(
    st.sampled_from(["train", "validation"]),
    st.sampled_from(["error", "rmse", "loss"]),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_target_says_itself_exactly(part: str, measure: str, value: float) -> None:
    """A record carries the text: it must be the target that was measured to, not a rounded one."""
    target = Target(part, measure, value if measure == "loss" else abs(value))
    assert Target.parse(str(target)) == target


def test_a_target_is_reached_at_its_value_and_below() -> None:
    target = Target.parse("error <= 0.25")
    assert target.reached(make_epoch(1, {"error": 0.25}))
    assert target.reached(make_epoch(1, {"error": 0.2}))
    assert not target.reached(make_epoch(1, {"error": 0.25000001}))


def test_each_part_and_measure_is_looked_at_alone() -> None:
    epoch = make_epoch(1, {"loss": 2.0, "error": 0.5}, {"loss": 1.0, "rmse": 0.1})
    assert not Target.parse("loss <= 1").reached(epoch)
    assert Target.parse("validation loss <= 1").reached(epoch)
    assert Target.parse("train error <= 0.5").reached(epoch)
    assert Target.parse("validation rmse <= 0.1").reached(epoch)


def test_what_was_not_measured_is_not_reached() -> None:
    assert not Target.parse("rmse <= 9").reached(make_epoch(1, {"error": 0.0}))
    assert not Target.parse("validation error <= 9").reached(make_epoch(1, {"error": 0.0}))
    assert not Target.parse("loss <= 9").reached(make_epoch(1, {"loss": math.nan}))


def test_the_epochs_to_a_target_end_at_the_first_that_reached_it() -> None:
    records = [make_epoch(n, {"error": error}) for n, error in enumerate((0.9, 0.4, 0.2, 0.3, 0.1), start=1)]
    assert Target.parse("error <= 0.3").epochs(records) == 3
    assert Target.parse("error <= 0.9").epochs(records) == 1
    assert Target.parse("error <= 0.1").epochs(iter(records)) == 5
    assert Target.parse("error <= 0.05").epochs(records) is None
    assert Target.parse("error <= 0.3").epochs([]) is None


def test_the_epochs_are_numbers_of_epochs_not_of_lines() -> None:
    assert Target.parse("error <= 0.3").epochs([make_epoch(7, {"error": 0.3})]) == 7


errors = st.lists(st.floats(0, 1), max_size=8)


@given(errors, st.floats(0, 1))
def test_a_harder_target_never_takes_fewer_epochs(values: list[float], value: float) -> None:
    records = [make_epoch(n, {"error": error}) for n, error in enumerate(values, start=1)]
    easy, hard = (Target("train", "error", v).epochs(records) for v in (value, value / 2))
    assert hard is None or (easy is not None and easy <= hard)
