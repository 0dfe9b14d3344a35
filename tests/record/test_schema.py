"""What files of a run directory may hold: wrong types and missing keys are errors that name file and key."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepex.errors import RunError
from deepex.record import RunDirectory
from deepex.record.schema import Machine, Measurement, checked, read_moments
from tests.record.test_run import make_epoch
from tests.report.records import Made, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(write_run(tmp_path / "run", Made(ranks=2, epochs=2, usage=True, drift=True)))


def change(path: Path, where: tuple[Any, ...], value: Any) -> None:
    """Set a key of a JSON file."""
    table = json.loads(path.read_text(encoding="utf-8"))
    inner = table
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(table), encoding="utf-8")


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (("ranks",), [4], "key 'ranks' is [4] (list); it must be int"),
        (("ranks",), True, "key 'ranks' is True (bool); it must be int"),
        (("ranks",), 0, "key 'ranks' is 0; it must be from 1 to"),
        (("network",), "lenet", "key 'network' is 'lenet' (str); it must be a table"),
        (("network", "parameters"), "many", "key 'network.parameters' is 'many' (str); it must be int"),
        (("samples", "train"), 1.5, "key 'samples.train' is 1.5 (float); it must be int"),
        (("comm",), ["mpi"], "key 'comm' is ['mpi'] (list); it must be a table"),
        (("started",), "yesterday", "key 'started' is 'yesterday'; it must be a time, such as 2026-01-31T12:00:00+00:00"),
        (("setup_seconds",), 1e300, "key 'setup_seconds' is 1e+300; it must be from 0 to 1e+18"),
        (("resumed",), {"2": 1}, "key 'resumed' is {'2': 1} (dict); it must be a list"),
        (
            ("changed",),
            [{"keys": {"batch": [16, 8, 4]}}],
            "key 'changed[0].keys.batch' is [16, 8, 4]; it must have two values",
        ),
        (("status",), None, "key 'status' is None (NoneType); it must be str"),
    ],
)
def test_a_wrong_value_in_run_json_names_file_key_value_and_rule(
    run: RunDirectory, where: tuple[str, ...], value: Any, why: str
) -> None:
    path = run.path / "run.json"
    change(path, where, value)
    with pytest.raises(RunError) as caught:
        _ = run.state
    assert str(caught.value).startswith(f"{path} is damaged: {why}")
    assert str(caught.value).endswith("; restore the file, or leave this run out")


def test_a_missing_key_is_told_where_it_is_looked_up(run: RunDirectory) -> None:
    """Older runs have fewer keys, so that only who needs one can say that it is missing."""
    path = run.path / "run.json"
    path.write_text(json.dumps({"schema": 1, "network": {"name": "lenet"}, "later": {"more": [{}]}}), encoding="utf-8")
    state = RunDirectory.open(run.path).state
    for look, key in (
        (lambda: state["ranks"], "ranks"),
        (lambda: state["network"]["parameters"], "network.parameters"),
        (lambda: state["later"]["more"][0]["x"], "later.more[0].x"),
    ):
        with pytest.raises(RunError) as caught:
            look()
        assert str(caught.value) == f"{path} is damaged: key {key!r} is missing; restore the file, or leave this run out"
    assert state.get("ranks") is None
    assert state == json.loads(path.read_text(encoding="utf-8")), "for everything else it is a plain table"


def test_keys_that_a_later_version_adds_are_kept(run: RunDirectory) -> None:
    change(run.path / "run.json", ("network",), {"name": "lenet", "parameters": 1, "depth": [1, {"x": None}]})
    run.set_state(reason="x")
    assert run.state["network"]["depth"] == [1, {"x": None}]


@pytest.mark.parametrize("value", [10**400, 2**64, float("nan"), float("inf")])
def test_a_number_that_cannot_be_is_told(run: RunDirectory, value: float) -> None:
    change(run.path / "run.json", ("setup_seconds",), value)
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        _ = run.state


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seconds": 0.0}, "key 'seconds' is 0.0; it must be from 1e-09 to 1e+12"),
        ({"seconds": float("nan")}, "key 'seconds' is nan"),
        ({"wall": [2.5, -3.0]}, "key 'wall' is [2.5, -3.0]"),
        ({"wall": [2.5, True]}, "key 'wall[1]' is True (bool)"),
        ({"drift": {"matrices": 0.1}}, "key 'drift' is {'matrices': 0.1}; it must have the key 'all'"),
        ({"usage": {"cpu_seconds": {"forward": []}}}, "key 'usage.cpu_seconds.forward' is []"),
        ({"epoch": -1}, "key 'epoch' is -1"),
        ({"train": {"loss": 10**400, "samples": 1}}, "has more than 64 bits"),
    ],
)
def test_an_epoch_that_cannot_be_is_told_with_its_line(run: RunDirectory, changes: dict[str, Any], why: str) -> None:
    with (run.path / "epochs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(make_epoch(3)) | changes) + "\n")
    with pytest.raises(RunError) as caught:
        run.epochs()
    assert "epochs.jsonl, line 3 is damaged" in str(caught.value)
    assert why in str(caught.value)


def test_a_loss_that_is_no_number_comes_back(run: RunDirectory) -> None:
    """A validation loss may overflow, while the training loss is still finite."""
    with (run.path / "epochs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(make_epoch(3)) | {"validation": {"loss": float("inf"), "samples": 1}}) + "\n")
    last = run.epochs()[-1].validation
    assert last is not None
    assert last.loss == float("inf")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (list[Machine], {}, "it is {} (dict); it must be a list"),
        (list[Machine], [{"cpu": {"num_cores_usable": "8"}}], "key '[0].cpu.num_cores_usable' is '8' (str); it must be int"),
        (list[Machine], [{"gpus": [3]}], "key '[0].gpus[0]' is 3 (int); it must be a table"),
        (list[Machine], [{"versions": {"torch": 2.1}}], "key '[0].versions.torch' is 2.1 (float); it must be str"),
        (list[Measurement], [{"seconds": [1.0, -1.0]}], "key '[0].seconds[1]' is -1.0; it must be from 0"),
    ],
)
def test_nested_tables_and_lists_are_checked(kind: Any, value: Any, why: str) -> None:
    with pytest.raises(RunError) as caught:
        checked(kind, value, Path("a.json"))
    assert f"a.json is damaged: {why}" in str(caught.value)


@pytest.mark.parametrize("line", ["[1]", '{"seconds": "x"}', '{"seconds": NaN}', '{"seconds": -1}', "3"])
def test_a_damaged_line_of_resources_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "resources.jsonl"
    path.write_text(f'{{"seconds": 1, "span_seconds": 0.2}}\n{line}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"resources\.jsonl, line 2 is damaged"):
        read_moments(path)
