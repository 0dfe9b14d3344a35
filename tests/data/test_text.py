"""Matrices as text, in the many ways in which programs print them."""

import csv
import gzip
import io
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deepex.data.source import SourceConfig, open_source, text
from deepex.data.source.base import Bad, Images
from deepex.data.source.text import open_text
from deepex.errors import DataError
from tests.full import examples

Array = NDArray[Any]


def read(images: Images, numbers: Sequence[int] | Array) -> tuple[Array, list[Bad]]:
    out = np.zeros((len(numbers), *images.shape), images.dtype)
    return out, images.read(np.asarray(numbers, np.int64), out)


def whole(images: Images) -> Array:
    out, bad = read(images, range(images.count))
    assert bad == []
    return out[..., 0]


def written(matrix: Array, style: str) -> str:
    """A matrix as numpy.savetxt, the csv module, a Fortran program or a person would print it; a newline at the end."""
    out = io.StringIO(newline="")
    if style == "savetxt":
        np.savetxt(out, matrix, fmt="%d" if matrix.dtype.kind == "u" else "%.9g")
    elif style == "savetxt long":
        np.savetxt(out, matrix)
    elif style == "csv":
        csv.writer(out).writerows(matrix.tolist())
    elif style == "tabs":
        out.write("".join("\t".join(map(str, row)) + "\n" for row in matrix.tolist()))
    elif style == "wide":
        out.write("".join("".join(f"{value!r:>24}" for value in row) + "  \n" for row in matrix.tolist()))
    else:
        out.write("# from a program, version 2\n" + "".join(", ".join(map(str, row)) + " # row\n" for row in matrix.tolist()))
    return out.getvalue()


STYLES = ("savetxt", "savetxt long", "csv", "tabs", "wide", "commented")
KINDS = {
    "uint8": hnp.arrays(np.uint8, st.tuples(st.integers(1, 6), st.just(2), st.integers(1, 5))),
    "float32": hnp.arrays(
        np.float32, st.tuples(st.integers(1, 6), st.just(2), st.integers(1, 5)), elements=st.floats(-(2.0**99), 2.0**99, width=32)
    ),
}


def same(images: Images, expected: Array) -> None:
    """Integers from 0 to 255 are stored as bytes whatever type they had when they were printed."""
    is_bytes = ((expected >= 0) & (expected <= 255) & (expected == np.rint(expected))).all()
    assert images.dtype == (np.uint8 if is_bytes else np.float32)
    np.testing.assert_array_equal(whole(images), expected)


@settings(deadline=None, max_examples=examples(20, 80))
@given(st.sampled_from(sorted(KINDS)).flatmap(KINDS.__getitem__), st.data())
def test_files_in_a_folder_are_read_as_printed(
    tmp_path_factory: pytest.TempPathFactory, matrices: Array, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for number, matrix in enumerate(matrices):
        content = written(matrix, data.draw(st.sampled_from(STYLES))).encode()
        content = data.draw(st.sampled_from((b"", b"\n", b"\xef\xbb\xbf", b"# note, with a comma\n"))) + content
        content = content.replace(b"\n", b"\r\n") if data.draw(st.booleans()) else content
        content = content.rstrip() if data.draw(st.booleans()) else content + b"\n  \n"
        packed = data.draw(st.booleans())
        suffix = data.draw(st.sampled_from(text.SUFFIXES)) + (".gz" if packed else "")
        (folder / f"{number}{suffix}").write_bytes(gzip.compress(content) if packed else content)
    images = open_text(folder).train
    same(images, matrices)
    assert (images.labels, images.block, images.busy) == (None, 1, True)


@settings(deadline=None, max_examples=examples(20, 80))
@given(st.sampled_from(sorted(KINDS)).flatmap(KINDS.__getitem__), st.data())
def test_many_matrices_in_one_file(tmp_path_factory: pytest.TempPathFactory, matrices: Array, data: st.DataObject) -> None:
    if len(matrices) == 1:
        matrices = np.concatenate([matrices, matrices])
    style, flat = data.draw(st.sampled_from(STYLES)), data.draw(st.booleans())
    blank = st.sampled_from(("\n", "\n\n", " \t\n", "\n# frame\n\n", "# end\n" + " " * 100 + "\n"))
    if flat:
        content = "".join(written(row[None], style) for row in matrices.reshape(len(matrices), -1))
    else:
        content = "".join(data.draw(blank) + written(matrix, style) for matrix in matrices)
    name = data.draw(st.sampled_from(("all.txt", "all.txt.gz")))
    path = tmp_path_factory.mktemp("text") / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    with mock.patch.multiple(
        text, _PIECE_BYTES=data.draw(st.sampled_from((7, 64, 1 << 22))), _GAP_BYTES=data.draw(st.sampled_from((0, 99)))
    ):
        images = open_text(path, shape=matrices.shape[1:] if flat or data.draw(st.booleans()) else None).train
        same(images, matrices)
        numbers = sorted(data.draw(st.sets(st.integers(0, len(matrices) - 1), min_size=1)))
        copy = pickle.loads(pickle.dumps(images))
        for _ in range(2):  # a compressed file goes back to its beginning
            np.testing.assert_array_equal(read(copy, numbers)[0][..., 0], matrices[numbers])


def test_class_folders_are_labels(tmp_path: Path) -> None:
    for number, name in enumerate(("folded", "unfolded", "folded", "unfolded", "unfolded")):
        (tmp_path / name).mkdir(exist_ok=True)
        np.savetxt(tmp_path / name / f"{number}.dat", np.full((2, 2), number), fmt="%d")
    (tmp_path / "folded" / "README.md").write_text("not a matrix")
    source = open_text(tmp_path)
    assert source.classes == ("folded", "unfolded")
    assert source.train.labels is not None
    assert source.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert whole(source.train)[:, 0, 0].tolist() == [0, 2, 1, 3, 4]
    assert source.train.description["other_files"] == 1
    (tmp_path / "molten").mkdir()
    with pytest.raises(DataError, match=r"the class .*molten has no file"):
        open_text(tmp_path)
    (tmp_path / "extra.txt").write_text("1 2\n3 4\n")
    with pytest.raises(DataError, match="matrices beside the folders folded, molten, unfolded"):
        open_text(tmp_path)


@pytest.mark.parametrize("held", ["validation", "val", "valid", "test"])
@pytest.mark.parametrize("inner", ["", "a"])
def test_train_and_validation_are_parts_and_not_classes(tmp_path: Path, held: str, inner: str) -> None:
    for number, part in enumerate(("train", "train", held)):
        (tmp_path / part / inner).mkdir(parents=True, exist_ok=True)
        np.savetxt(tmp_path / part / inner / f"{number}.dat", np.full((2, 2), number + (part == held) / 2))
        if part == "train":
            assert open_text(tmp_path).validation is None
    source = open_text(tmp_path, dtype="float32")
    assert source.validation is not None
    assert source.classes == (("a",) if inner else None)
    assert whole(source.train)[:, 0, 0].tolist() == [0, 1]
    assert whole(source.validation)[:, 0, 0].tolist() == [2.5]
    assert (source.validation.labels is None) == (not inner)
    assert [entry.reason for entry in read(open_text(tmp_path).validation, [0])[1]] == [  # type: ignore[arg-type]
        "line 1 has 2.500000000000000000e+00, but the first matrices hold integers from 0 to 255 only; pack with --dtype float32"
    ]
    (tmp_path / held / "b").mkdir()
    np.savetxt(tmp_path / held / "b" / "0.dat", np.zeros((2, 2)))
    with pytest.raises(
        DataError, match="class b has a folder for validation but none for train" if inner else "beside the folders"
    ):
        open_text(tmp_path)


@pytest.mark.parametrize("separator", [" ", ","])
def test_files_in_a_folder_may_have_their_matrix_on_one_line(tmp_path: Path, separator: str) -> None:
    matrices = np.arange(5 * 30).reshape(5, 6, 5)
    for number, matrix in enumerate(matrices):
        folder = tmp_path / ("val" if number == 4 else "train")
        folder.mkdir(exist_ok=True)
        np.savetxt(folder / f"{number}.txt", matrix.reshape(1, 30), fmt="%d", delimiter=separator, header="flat")
    source = open_source(tmp_path, SourceConfig(matrix=(6, 5)))
    same(source.train, matrices[:4])
    assert source.validation is not None
    same(source.validation, matrices[4:])
    np.savetxt(tmp_path / "train" / "0.txt", matrices[0], fmt="%d", delimiter=separator)
    odd = open_text(tmp_path, shape=(6, 5)).train
    assert [(entry.place, entry.reason) for entry in read(odd, range(4))[1]] == [
        (0, "line 1 has 5 numbers, where 30 are expected; all lines must have equally many")
    ]
    with pytest.raises(DataError, match="line 1 has 5 numbers, where 4 are expected"):
        open_text(tmp_path, shape=(7, 4))


GOOD = "1 2\n3 4\n"
BAD = {
    "1 2\n3\n": "line 2 has 1 numbers, where 2 are expected",
    "# head\n1 2\n3 4 5\n": "line 3 has 3 numbers, where 2 are expected",
    "1 2\n3 four\n": "line 2 has 'four', which is not a number",
    "1 2\n3 nan\n": "line 2 has 'nan', which is not finite",
    "-inf 2\n3 4\n": "line 1 has '-inf', which is not finite",
    "1 2\n3 1e400\n": "line 2 has 1e400",
    "1 2\n3 4\n5 6\n": "has 3 lines of numbers, where 2 are expected",
    "1 2\n\n3 4\n": "line 2 is blank",
    "1 2\n3 256\n": r"line 2 has 256, but .* --dtype float32",
    "1 2.5\n3 4\n": r"line 1 has 2\.5, but .* --dtype float32",
    "1,,2\n3,4\n": "line 1 has a comma with no number",
    "1,2,\n3,4,\n": "line 1 has a comma with no number",
    ",1 2\n3 4\n": "line 1 has a comma with no number",
    "1;2\n3;4\n": "line 1 has '1;2', which is not a number",
    "1,2\n3 4\n": "line 2 .*|.*more than one way",
    "1_0 2\n3 4\n": "line 1 has '1_0'",
    "0x10 2\n3 4\n": "line 1 has '0x10'",
    "1 2\n3 4\x00\n": "line 2 has '4",
    "1 2\n3 \xb2\n": "line 2 has ",
    "": "0 lines of numbers",
    "# nothing\n": "0 lines of numbers",
}


@pytest.mark.parametrize("content", BAD)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: str) -> None:
    for number, each in enumerate((GOOD, content, GOOD)):
        (tmp_path / f"{number}.txt").write_text(each, encoding="latin1")
    with mock.patch.object(text, "_FIRST", 1):
        images = open_text(tmp_path).train
    out, bad = read(images, range(3))
    assert [(entry.place, entry.name) for entry in bad] == [(1, str(tmp_path / "1.txt"))]
    assert re.search(BAD[content], bad[0].reason), bad[0].reason
    assert out[[0, 2], ..., 0].tolist() == [[[1, 2], [3, 4]]] * 2


def test_a_first_file_with_two_matrices_does_not_decide_on_the_size(tmp_path: Path) -> None:
    for number, each in enumerate((f"{GOOD}\n{GOOD}", GOOD, GOOD)):
        (tmp_path / f"{number}.txt").write_text(each)
    images = open_text(tmp_path).train
    out, bad = read(images, range(3))
    assert images.shape == (2, 2, 1)
    assert [entry.place for entry in bad] == [0]
    assert "line 3 is blank" in bad[0].reason
    assert out[1:, ..., 0].tolist() == [[[1, 2], [3, 4]]] * 2


def test_most_of_the_first_files_decide_on_the_size(tmp_path: Path) -> None:
    for number in range(9):
        np.savetxt(tmp_path / f"{number}.txt", np.full((2, 2), 7) if number > 2 else np.full((3, 3), 0.5), fmt="%g")
    images = open_text(tmp_path).train
    assert (images.shape, images.dtype) == ((2, 2, 1), np.uint8)
    assert [entry.place for entry in read(images, range(9))[1]] == [0, 1, 2]


def test_a_bad_matrix_in_a_file_of_many_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "all.dat"
    path.write_text(f"{GOOD}\n{GOOD}\n1 2\n3 x\n\n{GOOD}\n9 9\n\n{GOOD}")
    out, bad = read(open_text(path).train, range(6))
    assert [entry.place for entry in bad] == [2, 4]
    assert bad[0].name == f"{path} matrix 2 (line 7)"
    assert "line 8 has 'x'" in bad[0].reason
    assert "from line 13 on it has 1 lines" in bad[1].reason
    assert (out[[0, 1, 3, 5], ..., 0] == [[1, 2], [3, 4]]).all()


def test_the_type_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "all.dat"
    path.write_text("1 2\n\n3 4\n\n5.5 6\n")
    with mock.patch.object(text, "_FIRST", 2):
        assert [entry.place for entry in read(open_text(path).train, range(3))[1]] == [2]
        np.testing.assert_array_equal(whole(open_text(path, dtype="float32").train)[2], [[5.5, 6]])


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1 2 3 4\n5 6 7 8\n")
    with pytest.raises(DataError, match=r"no blank line, so it is one matrix of 2 x 4; .*--matrix"):
        open_text(path)
    assert whole(open_text(path, shape=(2, 2)).train).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    with pytest.raises(DataError, match="line 1 has 4 numbers, where 3 are expected"):
        open_text(path, shape=(3, 3))
    for content, reason in (
        ("", "has no numbers"),
        ("# only\n\n", "has no numbers"),
        ("hello\n\nworld\n", "'hello', which is not a number"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=reason):
            open_text(path)
    with pytest.raises(DataError, match="cannot be read"):
        open_text(tmp_path / "nowhere.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no file with \.txt"):
        open_text(tmp_path / "empty")
    (tmp_path / "a.txt.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"both a\.txt and a\.txt\.gz"):
        open_text(tmp_path)


def test_names_that_are_not_utf_8_and_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(GOOD)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("1 2\n3 x\n")
    images = open_text(tmp_path).train
    _, bad = read(images, range(3))
    assert [entry.name.rsplit("/", 1)[1] for entry in bad] == ["loop.txt", r"\xff.txt"]
    assert "symbolic links" in bad[0].reason
    assert (bad[1].name + bad[1].reason).encode()


def test_a_file_of_unreasonable_size_is_not_taken_into_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(GOOD)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"1 2\n" * 10_000))
    with mock.patch.object(text, "MOST_BYTES", 1000), mock.patch("deepex.data.source.matrix.MOST_BYTES", 1000):
        _, bad = read(open_text(tmp_path).train, range(2))
        assert [entry.place for entry in bad] == [1]
        assert "more than 1000 bytes" in bad[0].reason
        (tmp_path / "line.txt").write_bytes(b"1 " * 3000)
        with mock.patch.object(text, "_PIECE_BYTES", 64), pytest.raises(DataError, match="a line of more than 1000 bytes"):
            open_text(tmp_path / "line.txt")
        (tmp_path / "many.txt").write_text(GOOD + "\n" + "1 2\n" * 1000 + "\n" + GOOD)
        _, bad = read(open_text(tmp_path / "many.txt").train, range(3))
        assert [(entry.place, "the limit for one matrix" in entry.reason) for entry in bad] == [(1, True)]


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    content = gzip.compress(b"\n".join([GOOD.encode()] * 500))
    path = tmp_path / "all.txt.gz"
    for damaged in (
        content[: len(content) // 2],
        content[:3],
        content[:20] + bytes(10) + content[30:],
        content[:-8] + bytes(8),
        b"1 2 3",
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"all\.txt\.gz cannot be read"):
            open_text(path)


@settings(deadline=None, max_examples=examples(37, 150))
@given(st.booleans(), st.booleans(), st.data())
def test_damaged_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, packed: bool, many: bool, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("text")
    matrix = data.draw(hnp.arrays(np.float32, (3, 4), elements=st.floats(-9, 9, width=16)) | hnp.arrays(np.uint8, (3, 4)))
    raw = written(matrix, data.draw(st.sampled_from(STYLES)))
    content = bytearray(("\n".join([raw] * 5) if many else raw).encode())
    content = bytearray(gzip.compress(content)) if packed else content
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255) | st.sampled_from(b"\n#, \r-.e9\0"))
    path = folder / ("b.txt.gz" if packed else "b.txt")
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    (folder / "a.txt").write_text(raw)
    try:
        images = open_text(path if many else folder).train
        out, bad = read(images, range(images.count))
    except DataError:
        return
    good = np.setdiff1d(np.arange(images.count), [entry.place for entry in bad])
    assert np.isfinite(out[good]).all()
    for number in range(images.count):
        one, reasons = read(images, [number])
        assert (not reasons) == (number in good)
        assert reasons or (one[0] == out[number]).all()
    assert all(path.name in entry.name and "line" in entry.reason + entry.name for entry in bad if many)
