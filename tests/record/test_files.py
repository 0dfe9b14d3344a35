import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.errors import RunError, StorageError
from deepex.record import files
from deepex.record.files import read_json, read_lines, write_atomic, write_json, write_text
from tests.full import examples


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that must survive."""
    path = tmp_path / "run.json"
    path.write_text("the old one", encoding="utf-8")
    return path


def only(path: Path) -> bool:
    """Whether nothing lies beside `path`: no temporary was left."""
    return [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_write_replaces_the_file(old: Path) -> None:
    write_text(old, "ä new öne\n")
    assert old.read_text(encoding="utf-8") == "ä new öne\n"
    assert only(old)


def test_the_file_is_on_disk_before_it_gets_its_name(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename may reach the disk before the data: data, rename, directory is the order that a power cut cannot break."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def watched_replace(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_text(old, "new")
    temporary = events[0].removeprefix("fsync ")
    assert temporary != old.name
    assert events == [f"fsync {temporary}", f"rename {temporary} {old.name}", f"fsync {old.parent.name}"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken disk"), ValueError("bad tensor"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_writer_that_fails_in_the_middle_leaves_the_old_file_whole(old: Path, error: BaseException) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half of the n", encoding="utf-8")
        raise error

    with pytest.raises((StorageError, type(error))):
        write_atomic(old, write)
    assert old.read_text(encoding="utf-8") == "the old one"
    assert only(old)


def test_text_that_cannot_be_encoded_leaves_the_old_file_whole(old: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(old, "half \ud800")
    assert old.read_text(encoding="utf-8") == "the old one"
    assert only(old)


@pytest.mark.parametrize("where", ["flush_file", "replace"])
def test_a_disk_that_fails_later_leaves_the_old_file_whole(old: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((files, "flush_file") if where == "flush_file" else (Path, "replace")), fail)
    with pytest.raises(StorageError, match="No space left"):
        write_text(old, "new")
    assert old.read_text(encoding="utf-8") == "the old one"
    assert only(old)


def test_a_writer_killed_in_the_middle_leaves_the_old_file_whole(old: Path) -> None:
    """A kill runs no handler at all; what it leaves must not be read as the file, nor stop the next write."""
    program = """
import os, signal, sys
from pathlib import Path
from deepex.record.files import write_atomic
def write(temporary):
    temporary.write_text("half of the n")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomic(Path(sys.argv[1]), write)
"""
    assert subprocess.run([sys.executable, "-c", program, str(old)], check=False).returncode == -9
    assert old.read_text(encoding="utf-8") == "the old one"
    write_text(old, "new")
    assert old.read_text(encoding="utf-8") == "new"
    assert only(old)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from deepex.errors import StorageError
from deepex.record.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # the write then fails with EFBIG, as a full quota does with EDQUOT
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_text(Path(sys.argv[1]), "x" * 100_000)
except StorageError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_with_path_cause_and_remedy(old: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(old)], capture_output=True, text=True, check=True)
    assert f"cannot write {old}" in done.stdout
    assert "File too large" in done.stdout
    assert "MB are free" in done.stdout
    assert "free space or raise the quota, or write to another directory" in done.stdout
    assert old.read_text(encoding="utf-8") == "the old one"
    assert only(old)


def full_device(_: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        file.write("x")


def test_a_writer_on_a_full_device_is_a_storage_error(old: Path) -> None:
    with pytest.raises(StorageError) as caught:
        write_atomic(old, full_device)
    assert f"cannot write {old}: No space left on device" in str(caught.value)
    assert "free space" in str(caught.value)


def missing_directory(path: Path) -> Path:
    return path / "gone" / "run.json"


def file_as_directory(path: Path) -> Path:
    (path / "file").write_text("", encoding="utf-8")
    return path / "file" / "run.json"


def directory_as_file(path: Path) -> Path:
    (path / "run.json" / "inside").mkdir(parents=True)
    return path / "run.json"


def name_too_long(path: Path) -> Path:
    return path / ("n" * 255)


@pytest.mark.parametrize("make", [missing_directory, file_as_directory, directory_as_file, name_too_long])
def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    with pytest.raises(StorageError) as caught:
        write_text(path, "new")
    assert f"cannot write {path}: " in str(caught.value)
    assert "check that the directory exists, is writable and is mounted" in str(caught.value)


def test_a_full_disk_in_a_directory_that_is_gone_is_still_one_error(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    text = str(files.storage_error(tmp_path / "gone" / "run.json", error))
    assert "Disk quota exceeded" in text
    assert "0.0 MB are free" in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(10, 40))
@given(json_values)
def test_json_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path) == value


def test_a_value_that_is_no_json_leaves_the_old_file_whole(old: Path) -> None:
    with pytest.raises(TypeError):
        write_json(old, {"when": object()})
    assert old.read_text(encoding="utf-8") == "the old one"
    assert only(old)


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b'{"a": 1,', 8),  # cut off: a name is missing
        (b'{"a": 1}}', 8),  # one brace too many
        (b"", 0),
        (b"\0" * 16, 0),  # what a file system leaves after a power cut
        (b'{"a": \xff}', 6),  # not UTF-8
    ],
)
def test_damaged_json_names_file_offset_and_remedy(tmp_path: Path, content: bytes, offset: int) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read_json(path)
    assert f"{path} is damaged at offset {offset}" in str(caught.value)
    assert "restore it or start a new run" in str(caught.value)


def test_a_file_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"machine\.json"):
        read_json(tmp_path / "machine.json")


DAMAGES = ["[" * 100_000, "1" * 5000, "1e999", r'"\ud800"', '{"a": 1, "a": 2}']


@pytest.mark.parametrize("content", DAMAGES, ids=lambda text: text[:6])
def test_a_damage_that_python_has_no_error_for_is_an_error_of_ours(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content + "\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"a\.json is damaged"):
        read_json(path)
    path.write_text(f"1\n{content}\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"a\.json, line 2 is damaged.*delete the line or restore the file"):
        read_lines(path)


def test_lines_that_are_gone_are_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"resources\.jsonl cannot be read"):
        read_lines(tmp_path / "resources.jsonl")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "machine.json")
    with pytest.raises(RunError, match=r"machine\.json cannot be read: it is a pipe"):
        read_json(tmp_path / "machine.json")
