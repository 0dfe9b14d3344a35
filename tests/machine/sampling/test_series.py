"""The lines of resources.jsonl: what they say, and that there are never too many."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.machine.sampling.series import Series, merged
from deepex.record import RunDirectory


def fill(series: Series, count: int, *, passed: float = 0.2, epoch: int = 1) -> None:
    for number in range(count):
        series.add({"read_bytes": 0.0}, {"read_bytes": 20.0, "memory_bytes": float(number)}, passed=passed, epoch=epoch)


def read(path: Path) -> list[dict[str, float]]:
    return RunDirectory(path.parent).resources()[""]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "resources.jsonl"


def test_a_line_has_rates_and_levels(path: Path) -> None:
    series = Series(path, 0.2, num_cores=4)
    before = {"cpu_seconds": 1.0, "node_idle_seconds": 10.0, "gpu_joules": 5.0, "gpu_busy_seconds": 0.0}
    after = {"cpu_seconds": 1.25, "node_idle_seconds": 11.0, "gpu_joules": 105.0, "gpu_busy_seconds": 0.4, "gpu_memory_bytes": 7.0}
    series.add(before, after, passed=0.5, epoch=3)
    series.write()
    assert read(path) == [
        {
            "seconds": 0.5,
            "span_seconds": 0.5,
            "epoch": 3,
            "cpu_cores": 0.5,
            "node_cores": 2.0,
            "gpu_watts": 200.0,
            "gpu_utilisation": 0.8,
            "gpu_memory_bytes": 7.0,
        }
    ]


def test_lines_are_added_epoch_by_epoch(path: Path) -> None:
    series = Series(path, 0.2)
    for epoch in (1, 2, 3):
        fill(series, 2, epoch=epoch)
        series.write()
        assert [line["epoch"] for line in read(path)] == [number for number in range(1, epoch + 1) for _ in range(2)]
    assert [line["seconds"] for line in read(path)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])


@given(st.integers(0, 400), st.integers(1, 7))
def test_however_long_a_run_its_lines_are_few_and_tell_all(count: int, write_every: int) -> None:
    """The bytes of all lines sum up to what was read, and each line but the last is as long as the interval has become."""
    path = Path(tempfile.mkdtemp()) / "resources.jsonl"
    series = Series(path, 0.2, most=16)
    for number in range(count):
        after = {"read_bytes": 20.0, "memory_bytes": float(number)}
        series.add({"read_bytes": 0.0}, after, passed=0.2, epoch=1)
        if number % write_every == 0:
            series.write()
    series.write(last=True)
    lines = read(path) if count else []
    assert len(lines) < 16
    assert sum(line["span_seconds"] * line["read_bytes_per_second"] for line in lines) == pytest.approx(20.0 * count)
    assert max((line["memory_bytes"] for line in lines), default=0) == max(0, count - 1)
    if count >= 16:
        assert len(lines) >= 8
        assert len({line["span_seconds"] for line in lines[:-1]}) == 1


def test_many_short_epochs_do_not_make_many_lines(path: Path) -> None:
    series = Series(path, 0.2)
    for epoch in range(100):
        fill(series, 1, passed=0.01, epoch=epoch)
    series.write(last=True)
    assert 5 <= len(read(path)) <= 7


def test_a_resumed_run_goes_on(path: Path) -> None:
    first = Series(path, 0.2)
    fill(first, 3)
    first.write(last=True)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"seconds": 0.')  # killed as it wrote
    second = Series(path, 0.2)
    second.open()
    fill(second, 2, epoch=2)
    second.write(last=True)
    assert [line["seconds"] for line in read(path)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [line["epoch"] for line in read(path)] == [1, 1, 1, 2, 2]


def test_a_long_run_that_is_resumed_keeps_its_interval(path: Path) -> None:
    """Or its early part would be thinned with every resume."""
    first = Series(path, 0.2, most=16)
    fill(first, 40)
    first.write(last=True)
    spans = [line["span_seconds"] for line in read(path)]
    second = Series(path, 0.2, most=16)
    second.open()
    fill(second, 4)
    second.write(last=True)
    assert spans[:-1] == pytest.approx([0.8] * (len(spans) - 1))
    assert [line["span_seconds"] for line in read(path)] == pytest.approx([*spans, 0.8])


@pytest.mark.parametrize(
    "text",
    [
        "17\n",
        '{"other": 1}\n',
        '{"seco\n{}\n',
        "\xff\n",
        '{"seconds": 1, "span_seconds": 1e308}\n',
        '{"seconds": 1, "span_seconds": Infinity}\n',
        '{"seconds": "x", "span_seconds": 1}\n',
        "[" * 100_000 + "\n",
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_is_none_of_ours_ends_no_run(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    series = Series(path, 0.2)
    series.open()
    fill(series, 1)
    series.write(last=True)
    assert len(read(path)) == 1


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    series = Series(tmp_path / "gone" / "resources.jsonl", 0.2)
    fill(series, 3)
    series.write()
    series.write(last=True)
    assert not (tmp_path / "gone").exists()


def test_lines_that_are_merged_keep_what_one_of_them_has() -> None:
    one = {"seconds": 1.0, "span_seconds": 1.0, "epoch": 1, "cpu_cores": 1.0, "memory_bytes": 9.0}
    two = {"seconds": 4.0, "span_seconds": 3.0, "epoch": 2, "cpu_cores": 2.0, "memory_bytes": 8.0, "cpu_watts": 50.0}
    expected = {"seconds": 4.0, "span_seconds": 4.0, "epoch": 2, "cpu_cores": 1.75, "memory_bytes": 9.0, "cpu_watts": 50.0}
    assert merged(one, two) == expected
    assert json.loads(json.dumps(expected)) == expected
