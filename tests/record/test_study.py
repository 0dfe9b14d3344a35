import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.errors import ConfigError, RunError
from deepex.record import PlannedRun, StudyDirectory, is_study
from deepex.record.files import write_json
from tests.full import examples

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
    write_json(study.run_path(second) / "failure.json", ["no table"])
    assert study.reason(second) == ""
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


RUN: dict[str, Any] = {"name": "a", "varied": {"ranks": 1}, "repeat": 1, "ranks": 1, "command": ["deepex", "train", "fashion"]}


def text_of(*plan: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"schema": 1, "kind": "strong", "plan": plan or [RUN], **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged at offset 1"),
        ("[]", "holds list, not a table"),
        (json.dumps({"schema": 9}), "has schema 9, this DeepEx reads 1"),
        (json.dumps({"schema": True, "kind": "x", "plan": []}), r"is damaged: key 'schema' is True \(bool\); it must be int"),
        (json.dumps({"schema": 1, "kind": "strong"}), "is damaged: key 'plan' is missing"),
        (text_of({"nme": 1}), r"is damaged: unknown key 'plan\.0\.nme'; did you mean plan\.0\.name"),
        (text_of(RUN, {**RUN, "name": 3}), r"key 'plan\.1\.name' is 3 \(int\); it must be str"),
        (text_of(RUN, RUN), r"key 'plan\.1\.name' is 'a', as key 'plan\.0\.name' is; each run needs its own"),
        (text_of({**RUN, "ranks": 0}), r"key 'plan\.0\.ranks' is 0; it must be from 1 to"),
        (text_of({**RUN, "repeat": -1}), r"key 'plan\.0\.repeat' is -1; it must be at least 1"),
        (text_of({**RUN, "command": []}), r"key 'plan\.0\.command' is empty"),
        (text_of({**RUN, "estimate_seconds": -1}), r"key 'plan\.0\.estimate_seconds' is -1\.0; it must be a number of seconds"),
        (text_of({**RUN, "varied": {"ranks": [1]}}), r"key 'plan\.0\.varied\.ranks' is \[1\]; it must be a text"),
        (text_of({**RUN, "varied": {"ranks": 10**400}}), r"damaged at offset 75: '1000.* has more than 64 bits"),
        (text_of(status="done"), r"key 'status' is 'done'; it must be one of: planned, running"),
    ],
)
def test_damage_is_named_with_file_key_rule_and_remedy(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        StudyDirectory.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith(("restore it or start a new study", "start a new run", "use the version that wrote it"))
    assert len(str(caught.value)) < 900


NO_NAMES = ["", ".", "..", "../victim", "a/b", "/etc", ".lock", "a\n", "a\0", "a b", "é", "a" * 300]


@pytest.mark.parametrize("name", NO_NAMES)
def test_the_name_of_a_run_is_no_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text_of({**RUN, "name": name}))
    with pytest.raises(RunError, match=r"key 'plan\.0\.name' is .*; it must be a name for a directory"):
        StudyDirectory.open(tmp_path)
    with pytest.raises(ConfigError, match=r"it must be a name for a directory"):
        StudyDirectory.create(tmp_path / "new", plan=[replace(PLAN[0], name=name)], machine=[], kind="strong")
    assert not (tmp_path / "new").exists()


ODD = {text: text for text in ("null", "true", "-1", "3", "1.5", "NaN", "Infinity", "1e999", '""', '"../x"', "[]", "{}", "[null]")}
ODD |= {"zero byte": r'"\u0000"', "half a character": r'"\ud800"', "5000 digits": "1" * 5000, "10**400": "1" + "0" * 400}
ODD |= {f"{depth} lists": "[" * depth + "]" * depth for depth in (200, 900, 100_000)}
ODD |= {"deep tables": '{"a":' * 5000 + "1" + "}" * 5000, "left out": ""}


@settings(max_examples=examples(300, 3000))
@given(st.data())
def test_whatever_the_file_holds_it_is_read_or_told(choice: st.DataObject) -> None:
    """A value of any key is another, a key is left out, another is there, or bytes have changed."""
    full = {"schema": 1, "kind": "strong", "recipe": "fashion", "settings": ["batch=8"], "options": {"ranks": [1]}, "targets": []}
    full |= {
        "machine": [{}],
        "started": "now",
        "status": "finished",
        "reason": "",
        "plan": [RUN | {"before": [], "estimate_seconds": 1}],
    }
    table = choice.draw(st.sampled_from([full, full["plan"][0]]))
    changed = dict(table)
    key = choice.draw(st.sampled_from([*table, "other"]))
    value = ODD[choice.draw(st.sampled_from(sorted(ODD)))]
    changed |= {key: "@"}
    if not value:
        del changed[key]
    text = json.dumps(changed if table is full else {**full, "plan": [changed]}).replace('"@"', value)
    data = bytearray(text.encode())
    for place in choice.draw(st.lists(st.integers(0, len(data) - 1), max_size=1)):
        data[place] = choice.draw(st.integers(0, 255))
    with TemporaryDirectory() as folder:
        (Path(folder) / "study.json").write_bytes(data)
        try:
            study = StudyDirectory.open(Path(folder))
        except RunError as error:
            said = str(error)
        else:
            said = folder
            assert all(study.run_path(planned).parent == study.path / "runs" for planned in study.plan)
        assert folder in said
        assert len(said) < 1000


def test_what_is_no_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a study directory .*`deepex study --out`"):
        StudyDirectory.open(tmp_path)
