import json
from pathlib import Path

import pytest

from deepex.errors import RunError
from deepex.record import PlannedRun, StudyDirectory, is_study
from deepex.record.files import write_json

PLAN = [
    PlannedRun(name=f"ranks-{ranks}", varied={"ranks": ranks}, repeat=1, ranks=ranks, command=("deepex", "train", "fashion"))
    for ranks in (1, 2)
]


def make(path: Path) -> StudyDirectory:
    return StudyDirectory.create(path, plan=PLAN, machine=[], kind="strong", recipe="fashion", settings=[], options={})


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    make(tmp_path / "study")
    study = StudyDirectory.open(tmp_path / "study")
    assert list(study.plan) == PLAN
    assert study.kind == "strong"
    assert is_study(tmp_path / "study")
    assert not is_study(tmp_path)


def test_what_became_of_a_run_is_read_from_the_run(tmp_path: Path) -> None:
    study, (first, second) = make(tmp_path), PLAN
    assert [study.status(planned) for planned in PLAN] == ["open", "open"]
    study.run_path(first).mkdir()
    write_json(study.run_path(first) / "run.json", {"schema": 1, "status": "finished", "reason": "done"})
    study.run_path(second).mkdir()
    write_json(study.run_path(second) / "failure.json", {"reason": "no memory"})
    assert [study.status(planned) for planned in PLAN] == ["finished", "failed"]
    assert study.reason(second) == "no memory"
    assert [planned.name for planned, _run in study.trained()] == [first.name]


def test_measurements_are_a_run_too(tmp_path: Path) -> None:
    study = make(tmp_path)
    study.run_path(PLAN[1]).mkdir()
    write_json(study.run_path(PLAN[1]) / "measurements.json", [{"bytes": 8}])
    assert study.status(PLAN[1]) == "finished"
    assert [tables for _planned, tables in study.measured()] == [[{"bytes": 8}]]


def test_a_study_is_not_overwritten(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(RunError, match=r"already holds a study; choose another --out"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged at offset 1"),
        ("[]", "holds list, not a table"),
        (json.dumps({"schema": 9}), "has schema 9, this DeepEx reads 1"),
        (json.dumps({"schema": 1, "plan": [{"nme": 1}]}), "has a damaged plan: unknown key 'nme'"),
        (json.dumps({"schema": 1}), "has a damaged plan"),
    ],
)
def test_damage_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(RunError, match=message):
        _ = StudyDirectory.open(tmp_path).plan


def test_what_is_no_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a study directory .*`deepex study --out`"):
        StudyDirectory.open(tmp_path)
