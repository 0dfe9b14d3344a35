"""What the study of transfers measures, on real ranks, and the line that it draws through the points."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepex.comm import as_communicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.errors import CommError, ConfigError
from deepex.study.transfer.fit import fit, worst_deviation
from deepex.study.transfer.measure import _crowded, _pairs, default_sizes, measure
from deepex.study.transfer.probe import HOST, all_reduce
from deepex.study.transfer.timing import Timing
from tests.full import examples
from tests.mpi import own_lines, run_ranks
from tests.pool import RankPool

SIZES = [8, 4096, 100_000]
QUICK = ("--seconds", "0.002", "--repeats", "3", "--sizes", ",".join(map(str, SIZES)))


def _measured(tmp_path: Path, ranks: int, kind: str) -> list[dict[str, Any]]:
    out = tmp_path / "measurements.json"
    done = run_ranks(ranks, "-m", "deepex.study.transfer", "--out", str(out), "--comm", kind, *QUICK)
    assert done.returncode == 0, done.stderr[-3000:]
    tables = json.loads(out.read_text())
    assert all(table["path"] in done.stdout for table in tables), "what was written is printed too"
    return tables


def measure_on_ranks(comm: Any, kind: str) -> list[dict[str, Any]]:
    ours = as_communicator(comm)
    used = ours if kind == "mpi" else DistributedCommunicator(kind, bootstrap=ours)
    tables = measure(used, sizes=SIZES, timing=Timing(seconds=0.002, repeats=3))
    used.close()
    return tables


@pytest.mark.parametrize("kind", ["mpi", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_path_has_every_size(ranks: RankPool, size: int, kind: str) -> None:
    for tables in ranks.run(measure_on_ranks, kind, size=size):
        _check_tables(tables, size, kind)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind"), examples([(2, "gloo")], [(2, "mpi"), (2, "gloo"), (4, "mpi"), (4, "gloo")]))
def test_the_program_writes_what_is_measured(tmp_path: Path, ranks: int, kind: str) -> None:
    _check_tables(_measured(tmp_path, ranks, kind), ranks, kind)


def _check_tables(tables: list[dict[str, Any]], ranks: int, kind: str) -> None:
    expected = {"memory": 1, f"memory, {ranks} ranks at once": ranks}
    expected |= {f"rank-rank {kind}, 0 and {other}": 2 for other in {1, ranks - 1}}
    for group in {2, ranks}:
        expected |= dict.fromkeys((f"all-reduce {kind}, {group} ranks", f"all-reduce {kind}, {group} ranks, own memory"), group)
    assert {table["path"]: table["ranks"] for table in tables} == expected
    for path in expected:
        mine = [table for table in tables if table["path"] == path]
        assert [table.get("bytes") for table in mine] == [*SIZES, None], "points first, in order of size, then their line"
        _check_points(mine[:-1])
        line = mine[-1]["fit"]
        assert line["latency_seconds"] >= 0
        assert line["bandwidth_bytes_per_second"] is None or line["bandwidth_bytes_per_second"] > 0
    assert {table["comm"] for table in tables} == {kind}


def _check_points(points: list[dict[str, Any]]) -> None:
    for point in points:
        assert len(point["seconds"]) == 3
        assert min(point["seconds"]) > 0
        middle = sorted(point["seconds"])[1]
        assert point["bandwidth_bytes_per_second"] == pytest.approx(point["bytes"] / middle)
        if point["kind"] == "all-reduce":
            share = 2 * (point["ranks"] - 1) / point["ranks"]
            assert point["bus_bandwidth_bytes_per_second"] == pytest.approx(share * point["bandwidth_bytes_per_second"])
        else:
            assert "bus_bandwidth_bytes_per_second" not in point


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--groups", "3", "--groups has 3; a group has 2 ranks at least and at most the 2 that there are"),
        *examples(
            [],
            [
                ("--sizes", "8,7", "--sizes has 7; a size is a multiple of 4 bytes, for example 8,1024,1048576"),
                ("--comm", "nccl", "comm is nccl, but the device is cpu: NCCL needs GPUs; use mpi or gloo"),
            ],
        ),
    ],
)
def test_a_mistake_is_told_once(tmp_path: Path, option: str, value: str, says: str) -> None:
    if option == "--comm" and torch.cuda.is_available():
        pytest.skip("there is a GPU, so NCCL is no mistake")
    done = run_ranks(2, "-m", "deepex.study.transfer", "--out", str(tmp_path / "x.json"), option, value)
    assert own_lines(done.stderr) == [f"deepex: {says}"]
    assert done.returncode
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--seconds", "0", "--seconds is 0.0; it must be above 0, for example 0.3"),
        ("--seconds", "long", "--seconds has 'long'; it takes a number, for example 0.3"),
        ("--seconds", "nan", "--seconds is nan; it must be above 0, for example 0.3"),
        ("--repeats", "0", "--repeats is 0; it must be at least 1, for example 5"),
        ("--repeats", "2.5", "--repeats has '2.5'; it takes whole numbers, for example 2"),
        ("--sizes", "8,x", "--sizes has 'x'; it takes whole numbers, for example 2"),
        ("--comm", "mip", "unknown communicator 'mip'; did you mean mpi?"),
    ],
)
def test_bad_options_say_value_rule_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, says: str
) -> None:
    from deepex.study.transfer.measure import main

    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "x.json"), option, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"deepex: {says}")


def test_one_rank_measures_its_memory_and_writes_nothing_that_json_lacks() -> None:
    tables = measure(SoloCommunicator(), sizes=[64, 8], timing=Timing(seconds=1e-4, repeats=1))
    assert [(table["path"], table.get("bytes")) for table in tables] == [("memory", 8), ("memory", 64), ("memory", None)]
    json.dumps(tables, allow_nan=False)


def test_a_size_that_memory_lacks_is_refused() -> None:
    with pytest.raises(AgreedError, match=r"--sizes has 4611686018427387904, but a rank has memory for \d+ bytes: leave it out"):
        measure(SoloCommunicator(), sizes=[1 << 62])


def test_ranks_that_share_cores_are_told() -> None:
    assert _crowded(4, 2) == "4 ranks on 2 cores: times are those of waiting for a core"
    assert {_crowded(2, 2), _crowded(4, None)} == {""}


def test_sizes_by_default() -> None:
    sizes = default_sizes()
    assert (sizes[0], sizes[-1]) == (8, 64 << 20)
    assert all(4 * low == high for low, high in pairwise(sizes[:-1]))
    assert default_sizes(1000) == [8, 32, 128, 512, 1000]
    assert default_sizes(0) == [8]


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ([0], {}),
        ([0, 0], {1: "within a node"}),
        ([0, 0, 0, 0], {1: "within a node", 3: "within a node"}),
        ([0, 0, 1, 1, 2], {1: "within a node", 2: "between nodes", 4: "between nodes"}),
        ([0, 1, 0, 1], {1: "between nodes", 2: "within a node", 3: "between nodes"}),
    ],
)
def test_pairs_are_within_and_between_nodes(nodes: list[int], pairs: dict[int, str]) -> None:
    assert _pairs(nodes) == {(0, other): note for other, note in pairs.items()}


def test_a_sum_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SoloCommunicator()
    monkeypatch.setattr(SoloCommunicator, "sum", lambda _self, tensor, _weight=1.0: tensor.add_(1))
    with pytest.raises(CommError, match=r"gave 2.0 instead of 1.0"):
        all_reduce("solo", 1, device=HOST).make(comm, 64)


seconds = st.floats(1e-7, 1e-2)
speeds = st.floats(1e6, 1e12)
several = st.lists(st.sampled_from(default_sizes()), min_size=3, unique=True)


@given(seconds, speeds, several)
def test_a_line_is_found_again(latency: float, speed: float, sizes: list[int]) -> None:
    points = [(size, latency + size / speed) for size in sizes]
    found = fit(points)
    # What is below a millionth of the times that were seen cannot be told from them.
    assert found[0] == pytest.approx(latency, rel=1e-4, abs=1e-6 * min(t for _, t in points))
    assert 1 / found[1] == pytest.approx(1 / speed, rel=1e-4, abs=1e-6 * min(t / n for n, t in points))
    assert worst_deviation(points, *found) < 1e-4


@given(st.lists(st.tuples(st.sampled_from(default_sizes()), st.floats(1e-8, 1.0)), min_size=2))
def test_no_line_is_below_zero_nor_beaten_by_its_neighbours(points: list[tuple[int, float]]) -> None:
    if len({size for size, _ in points}) < 2:
        with pytest.raises(ValueError, match="two sizes"):
            fit(points)
        return
    latency, speed = fit(points)
    assert latency >= 0
    assert speed > 0
    best = _cost(points, latency, 1 / speed)
    for scale in (0.99, 1.01):
        assert best <= _cost(points, latency * scale, 1 / speed) * (1 + 1e-9) + 1e-12
        assert best <= _cost(points, latency, scale / speed) * (1 + 1e-9) + 1e-12


def _cost(points: list[tuple[int, float]], latency: float, slope: float) -> float:
    return math.fsum(((latency + slope * size - time) / time) ** 2 for size, time in points)


def test_time_that_does_not_grow_has_no_limit() -> None:
    assert fit([(8, 2e-6), (64, 2e-6), (512, 2e-6)]) == (pytest.approx(2e-6), math.inf)


def test_timing_refuses_what_it_cannot_do() -> None:
    for bad in ({"seconds": -1.0}, {"seconds": math.inf}, {"repeats": 0}):
        with pytest.raises(ConfigError):
            Timing(**bad)
