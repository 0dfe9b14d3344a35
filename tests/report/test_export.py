"""Records for other programs, read back by what those programs do with them."""

import csv
import io
import json
from pathlib import Path

import pytest

from deepex.errors import RunError, UnknownName
from deepex.record import PHASES
from deepex.report.collect import Collection, collect
from deepex.report.export import export
from tests.report.records import Made, strong, transfer, write_run


def test_csv_has_a_line_for_each_epoch(tmp_path: Path) -> None:
    collection = collect([strong(tmp_path / "strong", ranks=(1, 2))])
    rows = list(csv.DictReader(io.StringIO(export(collection, "csv"))))
    epochs = [(run, epoch) for run in collection.all_runs() for epoch in run.epochs]
    assert len(rows) == len(epochs)
    for row, (run, epoch) in zip(rows, epochs, strict=True):
        assert (row["run"], int(row["ranks"]), int(row["epoch"])) == (run.name, run.ranks, epoch.epoch)
        assert float(row["seconds"]) == epoch.seconds
        assert float(row["validation_error"]) == epoch.validation.get("error")
        assert "validation_rmse" not in row, "no run measures it"
        assert sum(float(row[f"{phase}_seconds"]) for phase in PHASES) == pytest.approx(sum(map(epoch.phase_seconds, PHASES)))


def test_names_with_commas_and_lines_stay_one_cell(tmp_path: Path) -> None:
    run = write_run(tmp_path / 'a, "b"', Made(epochs=2))
    rows = list(csv.reader(io.StringIO(export(collect([run]), "csv"))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[1][0] == 'a, "b"'


def test_a_setting_and_what_was_measured_have_columns_of_their_own(tmp_path: Path) -> None:
    collection = collect([strong(tmp_path / "strong", ranks=(1, 2))])
    for run in collection.all_runs():
        run.varied["samples"] = 64
    first = next(csv.DictReader(io.StringIO(export(collection, "csv"))))
    assert (first["set_samples"], int(first["samples"])) == ("64", collection.all_runs()[0].epochs[0].samples)


@pytest.mark.parametrize(
    ("target", "status"), [("validation error <= 0.9", "success"), ("", "success"), ("validation error <= 0", "aborted")]
)
def test_a_run_that_missed_its_target_is_no_success(target: str, status: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(epochs=3, config={"target": target}))
    (stop,) = [line for line in _lines(collect([run])) if line["key"] == "run_stop"]
    assert stop["metadata"]["status"] == status


def _lines(collection: Collection) -> list[dict[str, object]]:
    """As MLPerf's parser reads a log: the mark, then JSON."""
    lines = export(collection, "mlperf").splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_mlperf_lines_tell_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(ranks=4, epochs=3, config={"target": "validation error <= 0.9"}))
    collection = collect([run])
    lines = _lines(collection)
    keys = [line["key"] for line in lines]
    assert keys.index("run_start") < keys.index("epoch_start") < keys.index("eval_accuracy") < keys.index("run_stop")
    assert (keys.count("epoch_start"), keys.count("epoch_stop"), keys.count("eval_accuracy")) == (3, 3, 3)
    assert {"namespace", "time_ms", "event_type", "key", "value", "metadata"} == set(lines[0])
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    (read,) = collection.runs
    by_key = {line["key"]: line for line in lines}
    assert by_key["global_batch_size"]["value"] == 4 * 32
    assert by_key["eval_accuracy"]["value"] == pytest.approx(1 - read.epochs[-1].validation.get("error"))
    assert by_key["run_stop"]["metadata"]["status"] == "success"
    spent = by_key["run_stop"]["time_ms"] - by_key["run_start"]["time_ms"]
    assert spent == pytest.approx(1000 * sum(e.seconds + (e.validation.seconds or 0) for e in read.epochs), abs=2)


def test_a_run_that_did_not_finish_is_aborted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(epochs=2), status="stopped", reason="by SIGTERM")
    assert _lines(collect([run]))[-1]["metadata"]["status"] == "aborted"


def test_extrap_has_every_steady_epoch_at_its_ranks(tmp_path: Path) -> None:
    collection = collect([strong(tmp_path / "strong", ranks=(1, 2, 4))])
    table = json.loads(export(collection, "extrap"))
    assert table["parameters"] == ["ranks"]
    assert set(table["measurements"]) == {"train", *(f"train->{phase}" for phase in PHASES)}
    points = table["measurements"]["train"]["time"]
    assert [point["point"] for point in points] == [[1], [2], [4]]
    of_one = [epoch.seconds for run in collection.all_runs() if run.ranks == 1 for epoch in run.steady]
    assert points[0]["values"] == of_one
    assert len({len(point["values"]) for point in points}) == 1, "Extra-P wants equally many at each point"


def test_what_has_no_trainings_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Extra-P's format is for trainings"):
        export(collect([transfer(tmp_path / "transfer")]), "extrap")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="csv, extrap, mlperf"):
        export(Collection(), "xml")
