import pytest

from deepex.record import PHASES, EpochRecord, Score
from deepex.record.measure import EARLIER
from deepex.speedup.target import common_target


def run(*errors: float, validation: bool = True, rmse: bool = False) -> list[EpochRecord]:
    def score(value: float) -> Score:
        return Score(loss=1.0, samples=10, measures={"rmse" if rmse else "error": value})

    return [
        EpochRecord(
            epoch=number,
            samples=10,
            steps=1,
            syncs=1,
            rate=0.1,
            train=score(error / 2),
            seconds=1.0,
            phases={name: [0.2] for name in PHASES},
            wall=[1.0],
            validation=score(error) if validation else None,
        )
        for number, error in enumerate(errors, start=1)
    ]


def test_every_setting_reaches_it() -> None:
    settings = [[run(0.4, 0.2, 0.17)], [run(0.5, 0.203, 0.3)], [run(0.4, 0.181)]]
    assert common_target(settings, EARLIER["error"]) == "validation error <= 0.21"


def test_a_setting_that_did_not_learn_does_not_count() -> None:
    assert common_target([[run(0.4, 0.2)], [run(0.9, 0.9)]], EARLIER["error"]) == "validation error <= 0.2"


def test_every_run_of_a_setting_reaches_it() -> None:
    """For one that does not would leave the whole setting without an answer."""
    assert common_target([[run(0.2), run(0.2), run(0.23)], [run(0.2)]], EARLIER["error"]) == "validation error <= 0.23"


def test_without_validation_the_training_part_is_measured() -> None:
    assert common_target([[run(0.4, validation=False, rmse=True)]], EARLIER["rmse"]) == "train rmse <= 0.2"


@pytest.mark.parametrize("settings", [[], [[]], [[[]]]])
def test_without_runs_there_is_none(settings: list[list[list[EpochRecord]]]) -> None:
    assert common_target(settings, EARLIER["error"]) is None
