"""Records that somebody or something changed: a report is made, with the reason in it, or an error says what is wrong."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepex.errors import DeepexError
from deepex.record.run import hold
from deepex.record.table import dump_toml
from deepex.report.chapter import chapters
from deepex.report.collect import collect
from tests.full import examples
from tests.report.records import Made, write_run, write_study

OTHERS: list[Any] = [None, 3, "x", {}, [], [None], {"x": 1}]
LINE = 1  # of epochs.jsonl, the one that is changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    state = {"framework": {"name": "jax", "version": "1"}}
    write_run(path / "one", Made(ranks=2, epochs=3, usage=True, drift=True, state=state))
    write_run(path / "two", Made(ranks=4, epochs=3, usage=True, drift=True))
    write_study(path / "study", "strong", [({"ranks": 1}, Made(epochs=3)), ({"ranks": 2}, Made(ranks=2, epochs=3))])
    return path


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield where
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*where, key))


def put(value: Any, where: tuple[Any, ...], other: Any) -> Any:
    if not where:
        return other
    changed = value.copy()
    changed[where[0]] = put(value[where[0]], where[1:], other)
    return changed


def parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return {".toml": tomllib.loads, ".jsonl": lambda t: json.loads(t.splitlines()[LINE])}.get(path.suffix, json.loads)(text)


def changed(path: Path, where: tuple[Any, ...], other: Any) -> str:
    value = put(parsed(path), where, other)
    if path.suffix == ".toml":
        return dump_toml(value)
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return "\n".join([*lines[:LINE], json.dumps(value), *lines[LINE + 1 :], ""])
    return json.dumps(value)


@pytest.mark.parametrize("name", ["one/run.json", "one/machine.json", "one/epochs.jsonl", "one/config.toml", "study/study.json"])
@settings(max_examples=examples(8, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_a_value_of_another_type_is_told_or_does_no_harm(name: str, folder: Path, choice: st.DataObject) -> None:
    path = folder / name
    where = choice.draw(st.sampled_from([w for w in places(parsed(path)) if w or path.suffix != ".toml"]))
    other = choice.draw(st.sampled_from([one for one in OTHERS if path.suffix != ".toml" or one not in (None, [None])]))
    before = path.read_text(encoding="utf-8")
    path.write_text(changed(path, where, other), encoding="utf-8")
    with suppress(DeepexError):
        assert chapters(collect([folder]))
    path.write_text(before, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [
        ("run.json", ("dataset",), "key 'dataset' is 'x' (str); it must be a table"),
        ("machine.json", (0, "cpu"), "key '[0].cpu' is 'x' (str); it must be a table"),
        ("epochs.jsonl", ("phases", "forward", 1), "key 'phases.forward[1]' is 'x' (str); it must be float"),
        ("epochs.jsonl", ("usage", "memory_bytes", "epoch"), "key 'usage.memory_bytes.epoch' is 'x' (str); it must be a list"),
        ("epochs.jsonl", ("drift", "all"), "key 'drift.all' is 'x' (str); it must be float"),
    ],
)
def test_the_reason_names_file_and_key(name: str, where: tuple[Any, ...], why: str, tmp_path: Path) -> None:
    for run in ("good", "bad"):
        write_run(tmp_path / run, Made(ranks=2, epochs=3, usage=True, drift=True))
    path = tmp_path / "bad" / name
    path.write_text(changed(path, where, "x"), encoding="utf-8")
    (problem,) = collect([tmp_path]).problems
    assert problem.name == "bad"
    assert str(path) in problem.reason
    assert why in problem.reason


def test_a_run_that_was_killed_is_among_the_problems_with_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(epochs=2), status="running", reason="")
    with hold(run):
        assert [problem.status for problem in collect([run]).problems] == ["running"]
    (problem,) = collect([run]).problems
    assert problem.status == "killed"
    assert f"go on with `deepex train --resume {run}`; its 2 epoch(s) are counted" in problem.reason


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("measurements.json", [{"bytes": "8", "seconds": [1.0]}], "key '[0].bytes' is '8' (str); it must be int"),
        ("page_cache.json", {"cold": "yes"}, "key 'cold' is 'yes' (str); it must be bool"),
    ],
)
def test_what_a_study_measures_beside_runs_is_checked(name: str, value: Any, why: str, tmp_path: Path) -> None:
    runs = [({"placement": one}, Made(epochs=2)) for one in ("host", "device")]
    path = write_study(tmp_path / "study", "storage", runs) / "runs" / "host-r1" / name
    path.write_text(json.dumps(value), encoding="utf-8")
    (problem,) = collect([tmp_path]).problems
    assert f"{path} is damaged: {why}; restore the file, or leave this run out" in problem.reason
