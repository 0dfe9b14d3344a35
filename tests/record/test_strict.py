"""Texts that Python's parsers answer with an error of their own, or take although nobody writes them."""

import json
import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.errors import ConfigError, DataError
from deepex.errors import RunError as Damaged
from deepex.record.strict import MOST_LEVELS, parse_json, parse_toml


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (nested(100_000), "more than 64 levels deep"),
        ("[" * 100_000, "more than 64 levels deep"),
        ('{"a":' * 300 + "1" + "}" * 300, "more than 64 levels deep"),
        (f"[{'1' * 5000}]", "at offset 1: '1111"),
        ("[0, -9223372036854775809]", "at offset 4: '-9223372036854775809' has more than 64 bits"),
        ("18446744073709551616", "more than 64 bits"),
        ('["1e999", 1e999]', "at offset 10: '1e999' is beyond the range of numbers"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' is there twice"),
        (r'{"a": "\ud800"}', r"'\ud800' has half of a surrogate pair"),
        (r'{"\uDFFF": 1}', r"'\udfff' has half of a surrogate pair"),
        (b'{"a": "\xed\xa0\x80"}', "at offset 7: not UTF-8"),
        ('"\ud800"', "at offset 1: not UTF-8"),
        ('{"a": 1', "at offset 7: Expecting ',' delimiter"),
        ("", "at offset 0"),
    ],
)
def test_a_text_that_no_record_has_is_refused_with_the_place(text: str | bytes, why: str) -> None:
    with pytest.raises(Damaged) as caught:
        parse_json(text, "runs/a/run.json")
    assert str(caught.value).startswith("runs/a/run.json is damaged")
    assert why in str(caught.value)
    assert str(caught.value).endswith("; restore it or start a new run")
    assert len(str(caught.value)) < 200
    str(caught.value).encode()  # can be printed


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_what_is_not_a_number_is_there_only_where_it_may_be(token: str) -> None:
    (value,) = parse_json(f"[{token}]", "epochs.jsonl")
    assert not math.isfinite(value)
    with pytest.raises(Damaged, match=f"at offset {len(token) + 5}: {token} is not a finite number"):
        parse_json(f'["{token}", {token}]', "run.json", finite=True)


def test_the_error_and_the_remedy_are_those_of_the_caller() -> None:
    with pytest.raises(DataError, match=r"^manifest\.json is damaged at offset 0: .*; pack again$"):
        parse_json("x", "manifest.json", error=DataError, remedy="pack again")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (str(-(2**63)), -(2**63)),
        (str(2**64 - 1), 2**64 - 1),
        (r'"\ud83d\ude00"', "\N{GRINNING FACE}"),
        (r'"\\ud800"', r"\ud800"),
        ('"[[[NaN 1e999"', "[[[NaN 1e999"),
        ("1e308", 1e308),
        ("1e-999", 0.0),
    ],
)
def test_what_only_looks_like_damage_is_read(text: str, value: Any) -> None:
    assert parse_json(text, "x", finite=True) == value


def test_as_many_levels_as_allowed_are_read() -> None:
    assert json.dumps(parse_json(nested(MOST_LEVELS), "x")) == nested(MOST_LEVELS)
    assert parse_toml(f"a = {nested(MOST_LEVELS - 1)}", "x")
    with pytest.raises(Damaged):
        parse_json(nested(MOST_LEVELS + 1), "x")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(values, st.booleans())
def test_every_value_comes_back_as_python_would_read_it(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only), "x") == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"a = {nested(100_000)}", "more than 64 levels deep"),
        (f"a = {nested(90)}", "more than 64 levels deep"),
        ("a" + ".b" * 100 + " = 1", "more than 64 levels deep"),
        (f"a = {'1' * 5000}", "an integer has more than 64 bits"),
        (f"a = [{10**30}]", "an integer has more than 64 bits"),
        (f"a = 0x{'f' * 5000}", "an integer has more than 64 bits"),
        ("a = 1e999", "'1e999' is beyond the range of numbers"),
        ("a = nan", "'nan' is not a number"),
        ("a = 1979-05-27", "1979-05-27 is a date or a time: put quotes around it"),
        ("a = 1\na = 2", "Cannot overwrite a value"),
        (b"a = '\xff'", "byte 5 is not UTF-8"),
    ],
)
def test_toml_that_no_configuration_has_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "config.toml")
    assert str(caught.value).startswith("config.toml is not ")
    assert why in str(caught.value)
    assert str(caught.value).endswith("; mend it there")


@pytest.mark.parametrize("text", ["a = inf", "a = -inf", "a = 1_000.5", "[a]\nb = ['x', {c = true}]"])
def test_other_toml_is_read_as_python_reads_it(text: str) -> None:
    assert parse_toml(text, "x") == tomllib.loads(text)
