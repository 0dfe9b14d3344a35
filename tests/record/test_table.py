import math
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.arena.optimiser.config import OptimConfig
from deepex.errors import ConfigError
from deepex.record.table import (
    dump_toml,
    from_table,
    load_toml,
    parse_assignments,
    parse_value,
    set_values,
    to_table,
)
from deepex.sync.config import SyncConfig
from deepex.task import TASKS
from deepex.training.checkpoint import CheckpointConfig
from deepex.training.config import RunConfig
from tests.full import examples


@dataclass(frozen=True, kw_only=True)
class Inner:
    period: int | str | None = None
    mode: Literal["mean", "sum"] = "mean"
    steps: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 3
    rate: float = 0.5
    flag: bool = False
    note: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def message(kind: type, table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        from_table(kind, table)
    return str(caught.value)


# Filling a dataclass


def test_a_table_fills_every_kind_of_field() -> None:
    table = {
        "name": "a",
        "count": 7,
        "rate": 2,
        "flag": True,
        "note": "b",
        "options": {"deep": {"er": [1, 2]}},
        "inner": {"period": "4 per epoch", "mode": "sum", "steps": [1, 2.5]},
    }
    outer = from_table(Outer, table)
    assert outer == Outer(
        name="a",
        count=7,
        rate=2.0,
        flag=True,
        note="b",
        options={"deep": {"er": [1, 2]}},
        inner=Inner(period="4 per epoch", mode="sum", steps=(1.0, 2.5)),
    )
    assert type(outer.rate) is float
    assert [type(step) for step in outer.inner.steps] == [float, float]


def test_what_is_left_out_keeps_its_default() -> None:
    assert from_table(Outer, {"name": "a"}) == Outer(name="a")
    assert from_table(Outer, {"name": "a", "inner": {}}) == Outer(name="a")


def test_the_configuration_does_not_share_the_tables_memory() -> None:
    options = {"width": 2}
    outer = from_table(Outer, {"name": "a", "options": options})
    options["width"] = 3
    assert outer.options == {"width": 2}


def test_a_union_takes_each_of_its_kinds() -> None:
    assert from_table(Inner, {"period": 16}).period == 16
    assert from_table(Inner, {"period": "epoch"}).period == "epoch"
    assert from_table(Inner, {"period": None}).period is None


# Mistakes: each message has the key, the value and the rule


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": 3}, ("'name'", "3", "int", "must be str")),
        ({"name": "a", "count": 1.5}, ("'count'", "1.5", "float", "must be int")),
        ({"name": "a", "count": "7"}, ("'count'", "'7'", "str", "must be int")),
        ({"name": "a", "count": True}, ("'count'", "True", "bool", "must be int")),
        ({"name": "a", "rate": True}, ("'rate'", "True", "bool", "must be float")),
        ({"name": "a", "rate": "fast"}, ("'rate'", "'fast'", "str", "must be float")),
        ({"name": "a", "flag": 1}, ("'flag'", "1", "int", "must be bool")),
        ({"name": "a", "flag": "true"}, ("'flag'", "'true'", "must be bool")),
        ({"name": "a", "note": 4}, ("'note'", "4", "int", "must be str")),
        ({"name": "a", "options": [1]}, ("'options'", "[1]", "list", "must be a table")),
        ({"name": "a", "inner": 16}, ("'inner'", "16", "table", "inner.period")),
        ({"name": "a", "inner": {"mode": "median"}}, ("'inner.mode'", "'median'", "mean, sum")),
        ({"name": "a", "inner": {"mode": ["mean"]}}, ("'inner.mode'", "['mean']", "mean, sum")),
        ({"name": "a", "inner": {"period": 1.5}}, ("'inner.period'", "1.5", "float", "int or str")),
        ({"name": "a", "inner": {"period": True}}, ("'inner.period'", "True", "bool", "int or str")),
        ({"name": "a", "inner": {"steps": 30}}, ("'inner.steps'", "30", "list", "[30, 60]")),
        ({"name": "a", "inner": {"steps": "30"}}, ("'inner.steps'", "'30'", "list")),
        ({"name": "a", "inner": {"steps": [30, "x"]}}, ("'inner.steps'", "'x'", "str", "must be float")),
        ({"name": "a", "count": date(2024, 1, 1)}, ("'count'", "date", "must be int")),
    ],
)
def test_a_wrong_type_names_key_value_and_rule(table: dict[str, Any], words: tuple[str, ...]) -> None:
    text = message(Outer, table)
    assert [word for word in words if word not in text] == []


def test_an_unknown_key_lists_the_near_ones_and_all() -> None:
    text = message(Outer, {"name": "a", "cuont": 3})
    assert "unknown key 'cuont'" in text
    assert "did you mean count" in text
    assert all(f.name in text for f in fields(Outer))


def test_an_unknown_key_of_an_inner_table_is_written_in_full() -> None:
    text = message(Outer, {"name": "a", "inner": {"priod": 16}})
    assert "'inner.priod'" in text
    assert "did you mean inner.period?" in text
    assert "Keys here: inner.period, inner.mode, inner.steps" in text


def test_a_key_like_no_other_gets_no_guess() -> None:
    text = message(Outer, {"name": "a", "zzzz": 3})
    assert "did you mean" not in text
    assert "Keys here: name" in text


def test_a_missing_key_is_named() -> None:
    text = message(Outer, {"count": 3})
    assert "'name'" in text
    assert "missing" in text


# To a table and back


def test_none_is_left_out_and_tuples_are_lists() -> None:
    assert to_table(Outer(name="a", inner=Inner(steps=(1.0,)))) == {
        "name": "a",
        "count": 3,
        "rate": 0.5,
        "flag": False,
        "options": {},
        "inner": {"mode": "mean", "steps": [1.0]},
    }


def test_to_table_refuses_nothing_that_from_table_takes(tmp_path: Path) -> None:
    config = Outer(name="a", options={"widths": [1, 2], "inner": {"deep": True}})
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(to_table(config)), encoding="utf-8")
    assert from_table(Outer, load_toml(path)) == config


# A lone surrogate is no text, as no file can hold it; a zero byte is refused.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
finite = st.floats(allow_nan=False)
plain = st.one_of(texts, st.integers(-(2**63), 2**64 - 1), finite, st.booleans())  # a file with more bits is damaged
options = st.dictionaries(
    texts,
    st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4),
    max_size=2,
)

inners = st.builds(
    Inner,
    period=st.none() | st.integers() | texts,
    mode=st.sampled_from(["mean", "sum"]),
    steps=st.lists(finite, max_size=3).map(tuple),
)
outers = st.builds(
    Outer,
    name=texts,
    count=st.integers(),
    rate=finite,
    flag=st.booleans(),
    note=st.none() | texts,
    options=options,
    inner=inners,
)


@settings(max_examples=examples(12, 50))
@given(outers)
def test_any_nested_dataclass_goes_to_toml_and_back_unchanged(config: Outer) -> None:
    import tomllib

    assert from_table(Outer, tomllib.loads(dump_toml(to_table(config)))) == config


def between(low: float, high: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, **options)


optims = st.builds(
    OptimConfig,
    method=st.sampled_from(["sgd", "lars"]),
    rate=between(0, 1e3, exclude_min=True),
    momentum=between(0.001, 1, exclude_max=True),
    nesterov=st.booleans(),
    weight_decay=between(0, 1),
    trust=between(0, 1, exclude_min=True),
    schedule=st.sampled_from(["constant", "step", "polynomial", "cosine"]),
    warmup_epochs=between(0, 100),
    decay_epochs=st.lists(between(0, 100), min_size=1, max_size=3).map(tuple),
    decay=between(0, 1, exclude_min=True),
    power=between(0, 9, exclude_min=True),
    final=between(0, 1),
    scale_batch=st.integers(0, 10**6),
    scaling=st.sampled_from(["linear", "sqrt"]),
)
periods = st.none() | st.integers(1, 10**6) | st.just("epoch") | st.integers(1, 99).map("{} per epoch".format)
momenta = st.sampled_from(["average", "reset", "local"])
rules = st.sampled_from(["adacomm", "qsr", "auto", "1 until 5 then 16"])
syncs = st.one_of(
    st.builds(SyncConfig, strategy=st.just("weights"), period=periods | rules, momentum=momenta),
    st.builds(SyncConfig, strategy=st.just("gradients"), period=st.sampled_from([None, 1]), chunks=st.integers(1, 9)),
    st.builds(SyncConfig, strategy=st.sampled_from(["elastic", "streaming", "background"]), pull=between(0.1, 1), period=rules),
    st.builds(
        SyncConfig, outer=st.sampled_from(["slowmo", "muon"]), outer_rate=between(0, 1), wire=st.sampled_from(["bf16", "int8"])
    ),
)
checkpoints = st.builds(CheckpointConfig, epochs=st.integers(1, 99), syncs=st.integers(0, 99), keep=st.integers(1, 9))


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    task = draw(st.sampled_from(sorted(TASKS)))
    measure = draw(st.sampled_from(["loss", TASKS[task].measures[0].name]))
    target = f"{draw(st.sampled_from(['', 'train ', 'validation ']))}{measure} <= {draw(between(0, 1))}"
    return RunConfig(
        net=draw(texts),
        data=draw(texts),
        net_options=draw(options),
        init=draw(texts),
        task=task,
        epochs=draw(st.integers(1, 10**4)),
        batch=draw(st.integers(1, 10**6)),
        replicas=draw(st.integers(0, 10**4)),
        seed=draw(st.integers(0, 2**64 - 1)),
        target=draw(st.sampled_from([None, target])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        placement=draw(st.sampled_from(["auto", "device", "host", "stream"])),
        layout=draw(st.sampled_from(["auto", "channels_last", "contiguous"])),
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        comm=draw(st.sampled_from(["auto", "solo", "mpi", "gloo", "nccl"])),
        deterministic=draw(st.booleans()),
        threads=draw(st.integers(0, 256)),
        validate=draw(st.sampled_from(["parallel", "rank0"])),
        verify=draw(st.booleans()),
        optim=draw(optims),
        sync=draw(syncs),
        checkpoint=draw(checkpoints),
    )


@settings(max_examples=examples(10, 30))
@given(config=run_configs())
def test_a_run_configuration_goes_through_a_toml_file_unchanged(
    tmp_path_factory: pytest.TempPathFactory, config: RunConfig
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(dump_toml(to_table(config)), encoding="utf-8")
    assert from_table(RunConfig, load_toml(path)) == config


def test_every_key_of_a_run_configuration_is_written_unless_none() -> None:
    """`deepex train run/config.toml` repeats a run: a key that is left out would take a later version's default."""
    config = RunConfig(net="lenet", data="sample:fashion", target="error <= 0.1", sync=SyncConfig(period=3))
    table = to_table(config)
    assert set(table) == {f.name for f in fields(RunConfig)}
    assert set(table["optim"]) == {f.name for f in fields(OptimConfig)}
    assert set(table["sync"]) == {f.name for f in fields(SyncConfig)}


def test_infinity_survives() -> None:
    assert from_table(Inner, {"steps": [math.inf]}).steps == (math.inf,)


# Keys with dots


def test_dots_reach_into_tables_and_make_them() -> None:
    assert set_values({"a": 1, "sync": {"period": 1}}, {"sync.period": 16, "net_options.width.first": 3, "a": 2}) == {
        "a": 2,
        "sync": {"period": 16},
        "net_options": {"width": {"first": 3}},
    }


def test_a_value_is_no_table() -> None:
    with pytest.raises(ConfigError, match=r"'net\.width' cannot be set: 'net' is a value"):
        set_values({"net": "lenet"}, {"net.width": 3})


@pytest.mark.parametrize("key", ["a", "t.a", "t.u.a", "t.u.v.a"])
def test_the_table_that_came_in_is_left_alone(key: str) -> None:
    table = {"a": 0, "t": {"a": 0, "u": {"a": 0, "v": {"a": 0}}}}
    set_values(table, {key: 1})
    assert table == {"a": 0, "t": {"a": 0, "u": {"a": 0, "v": {"a": 0}}}}


@settings(max_examples=examples(10, 30))
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), st.integers())
def test_what_was_set_is_found_there(path: str, value: int) -> None:
    table: Any = set_values({}, {path: value})
    for key in path.split("."):
        table = table[key]
    assert table == value


# --set KEY=VALUE


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("-3", -3),
        ("0.05", 0.05),
        ("1e-4", 1e-4),
        ("true", True),
        ("false", False),
        ("[30, 60]", [30, 60]),
        ('"16"', "16"),
        ("'a b'", "a b"),
        ("{a = 1}", {"a": 1}),
        ("epoch", "epoch"),
        ("4 per epoch", "4 per epoch"),
        ("validation error <= 0.1", "validation error <= 0.1"),
        ("sample:fashion", "sample:fashion"),
        ("/data/set", "/data/set"),
        ("True", "True"),
        ("", ""),
        ("it's", "it's"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_value_is_toml_or_else_a_string(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_a_second_line_is_not_dropped() -> None:
    assert parse_value("1\nother = 2") == "1\nother = 2"


def test_assignments_become_changes() -> None:
    given = ["sync.period=16", " optim.rate = 0.1 ", "target=validation error <= 0.1", "net=my.module:function"]
    assert parse_assignments(given) == {
        "sync.period": 16,
        "optim.rate": 0.1,
        "target": "validation error <= 0.1",
        "net": "my.module:function",
    }


def test_a_word_for_a_table_is_for_its_first_key() -> None:
    table = {"sync": {"strategy": "weights", "period": 16}, "epochs": 3}
    expected = {"sync": {"strategy": "elastic", "period": 8}, "epochs": 3}
    assert set_values(table, {"sync": "elastic", "sync.period": 8}) == expected
    assert set_values(table, {"sync.period": 8, "sync": "elastic"}) == expected
    config = from_table(RunConfig, {"net": "lenet", "data": "here", "sync": "auto", "optim": "lars"})
    assert (config.sync.strategy, config.optim.method) == ("auto", "lars")
    with pytest.raises(ConfigError, match=r"key 'sync\.strategy' is 'atuo'; it must be one of: weights, "):
        from_table(RunConfig, {"net": "lenet", "data": "here", "sync": "atuo"})
    with pytest.raises(ConfigError, match=r"key 'sync' is 3; it is a table"):
        from_table(RunConfig, {"net": "lenet", "data": "here", "sync": 3})


def test_the_last_assignment_of_a_key_counts() -> None:
    assert parse_assignments(["epochs=1", "epochs=2"]) == {"epochs": 2}


@pytest.mark.parametrize("text", ["period", "=16", " =16", ""])
def test_what_is_no_assignment_is_shown_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignments([text])
    assert repr(text) in str(caught.value)
    assert "KEY=VALUE" in str(caught.value)


# TOML files


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 3\nbatch = = 4\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(path) in str(caught.value)
    assert "line 2" in str(caught.value)


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes("epochs = 3\n".encode("utf-8-sig"))
    assert load_toml(tmp_path / "mine.toml") == {"epochs": 3}


def test_a_binary_file_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"net = 1\n\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(path) in str(caught.value)
    assert "byte 8" in str(caught.value)
