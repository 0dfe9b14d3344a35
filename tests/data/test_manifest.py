import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepex.data.manifest import Manifest, PackedFile, Part, from_json, load, save, to_json
from deepex.errors import DataError
from tests.full import examples

DIGEST = "0123456789abcdef" * 4


def example() -> Manifest:
    files = tuple(
        PackedFile(
            images=f"train-{k:05d}.npy",
            labels=f"train-{k:05d}-labels.npy",
            count=k + 1,
            images_sha256=DIGEST,
            labels_sha256=DIGEST,
        )
        for k in range(2)
    )
    return Manifest(
        name="cats",
        shape=(3, 4, 5),
        dtype="uint8",
        layout="NHWC",
        classes=("cat", "dog"),
        order="shuffled",
        seed=1,
        scale=(0.0, 255.0),
        mean=(0.1, 0.2, 0.3),
        deviation=(0.1, 0.2, 0.3),
        parts={"train": Part(count=3, files=files)},
        source={"files": ["cats.npz"], "license": None},
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    channels = draw(st.integers(1, 4))
    number = st.floats(allow_nan=False, allow_infinity=False)
    classes = draw(st.lists(st.text(), max_size=3))
    names = (f"file-{k}.npy" for k in range(1000))

    def part() -> Part:
        counts = draw(st.lists(st.integers(1, 10**12), min_size=1, max_size=3))
        files = tuple(
            PackedFile(
                images=next(names),
                labels=next(names) if classes else None,
                count=count,
                images_sha256=DIGEST,
                labels_sha256=DIGEST if classes else None,
            )
            for count in counts
        )
        return Part(count=sum(counts), files=files)

    low, high = sorted(draw(st.lists(number, min_size=2, max_size=2, unique=True)))
    assume(1e-12 * max(abs(low), abs(high), 1e-280) < high - low < math.inf)
    deviation = draw(st.lists(st.floats(1e-30, 1e30), min_size=channels, max_size=channels))
    assume((high - low) * min(deviation) > 1e-36)
    return Manifest(
        name=draw(st.text(min_size=1)),
        shape=(channels, draw(st.integers(1, 4096)), draw(st.integers(1, 4096))),
        dtype=draw(st.sampled_from(["uint8", "float16", "float32"])),
        layout="NHWC",
        classes=tuple(classes),
        order=draw(st.sampled_from(["shuffled", "given"])),
        seed=draw(st.integers(0, 2**63)),
        scale=(low, high),
        mean=tuple(draw(number) for _ in range(channels)),
        deviation=tuple(deviation),
        parts={name: part() for name in draw(st.sampled_from([["train"], ["train", "validation"]]))},
        source=draw(
            st.dictionaries(st.text(), st.none() | st.text() | st.integers(-(2**63), 2**64 - 1) | st.lists(st.text()), max_size=3)
        ),
    )


@settings(deadline=None, max_examples=examples(12, 50))
@given(manifests())
def test_a_saved_manifest_loads_unchanged(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> None:
    directory = tmp_path_factory.mktemp("saved")
    save(directory, manifest)
    assert load(directory) == manifest


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value but those within `source`, which is free."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [place for key, child in inner if (*path, key) != ("source",) for place in places(child, (*path, key))]
    return [path, *below] if path else below


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=examples(37, 150))
@given(st.sampled_from(places(to_json(example()))), JSON)
def test_any_wrong_value_is_a_data_error_or_another_valid_manifest(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: Any
) -> None:
    table = to_json(example())
    inner: Any = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "manifest.json").write_text(json.dumps(table))
    try:
        loaded = load(directory)
    except DataError as error:
        message = str(error)
    else:
        message = str(directory) if from_json(to_json(loaded)) == loaded else "another manifest"
    assert str(directory) in message


@pytest.mark.parametrize("key", sorted(to_json(example())))
def test_each_key_is_needed(tmp_path: Path, key: str) -> None:
    table = to_json(example())
    del table[key]
    (tmp_path / "manifest.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=rf"manifest\.json: .*'{key}'.*pack the dataset again"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["version"], 2, ["'version' is 2", "reads version 1"]),
        (["version"], True, ["'version' is True"]),
        (["format"], "zip", ["'format' must be 'deepex-packed'"]),
        (["colour"], 1, ["unknown key 'colour'", "classes"]),
        (["shape"], [28, 28], ["'shape' is [28, 28]", "[channels, height, width]"]),
        (["shape"], [3, 0, 5], ["'shape' is [3, 0, 5]"]),
        (["shape"], [3, 2**40, 5], ["'shape' is [3, 1099511627776, 5]", "at most 1,000,000,000,000 values"]),
        (["scale"], [1.0, 1.0 + 2**-52], ["'scale' is [1.0, 1.0000000000000002]", "so far apart"]),
        (["scale"], [0.0, 5e-324], ["'scale' is [0.0, 5e-324]", "so far apart"]),
        (["scale"], [0.0, 1e-37], ["'scale' is [0.0, 1e-37]", "cannot tell such values"]),
        (["scale"], [-1e308, 1e308], ["'scale' is [-1e+308, 1e+308]", "so far apart"]),
        (["scale"], [0, 10**400], ["has more than 64 bits"]),
        (["mean"], [float("nan"), 0.5, 0.5], ["'mean' is [nan, 0.5, 0.5]"]),
        (["parts", "train", "files", 1, "count"], 2**60, ["files of parts.train", "at most 1,000,000,000,000,000"]),
        (["dtype"], "object", ["'dtype' is 'object'", "uint8"]),
        (["seed"], -1, ["'seed' is -1"]),
        (["name"], "", ["'name'"]),
        (["scale"], [1, 1], ["'scale' is [1.0, 1.0]", "low below high"]),
        (["mean"], [0.5], ["'mean' is [0.5]", "3 channels"]),
        (["deviation"], [0.1, 0, 0.1], ["'deviation'", "above 0"]),
        (["classes"], [], ["'parts.train.files[0].labels'", "must be null"]),
        (["parts"], {}, ["'parts' has nothing", "'train'"]),
        (["parts", "train", "count"], 4, ["'parts.train.count' is 4", "add up to 3"]),
        (["parts", "train", "files"], None, ["'parts.train.files' is None", "list"]),
        (["parts", "train", "files", 1, "count"], 0, ["'parts.train.files[1].count' is 0"]),
        (["parts", "train", "files", 1, "count"], "2", ["'parts.train.files[1].count' is '2'", "int"]),
        (["parts", "train", "files", 0, "labels"], None, ["'parts.train.files[0].labels' is None", "class names"]),
        (["parts", "train", "files", 0, "images"], "../x.npy", ["'../x.npy'", "plain name"]),
        (["parts", "train", "files", 0, "images"], "train-00001.npy", ["'train-00001.npy' is listed 2 times"]),
        (["parts", "train", "files", 0, "images_sha256"], "12", ["'12'", "64 hexadecimal"]),
    ],
)
def test_a_broken_rule_is_named_with_key_value_and_rule(tmp_path: Path, place: list[Any], value: Any, words: list[str]) -> None:
    table = to_json(example())
    inner: Any = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(table))
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    for word in [str(tmp_path / "manifest.json"), *words, "pack the dataset again"]:
        assert word in str(caught.value)


def test_a_manifest_is_checked_when_built() -> None:
    with pytest.raises(DataError, match="'seed' is -3"):
        replace(example(), seed=-3)


def test_a_missing_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no directory .*deepex data pack SOURCE"):
        load(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no manifest\.json, so it is not a packed dataset.*deepex data pack"):
        load(tmp_path)
    (tmp_path / ".packing").touch()
    with pytest.raises(DataError, match=r"did not finish .*run the same command again"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b'{"format": ', b"\xff\xfe", b"", b"[1]", b"[" * 100_000, b"1" * 5000, rb'"\ud800"'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        load(tmp_path)
