"""Reports of records with known numbers: the numbers come out, in figures and in words; bad input is named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepex.cli import app
from deepex.errors import RunError
from deepex.record.files import write_json
from deepex.report import make_report
from deepex.report.bars import Bars, bar_view
from deepex.report.chapter import chapters
from deepex.report.collect import collect
from deepex.report.experiment import Experiment, experiments
from deepex.report.figure import Figure, Section, plain, quantile, thin
from deepex.report.page import safe_json, slug
from deepex.report.words import number, seconds, share, size
from deepex.speedup.statistics import Interval
from tests.report.conftest import HOSTILE
from tests.report.records import SHARES, Made, storage, strong, write_run


def of(path: Path) -> list[Section]:
    return chapters(collect([path]))


def figure(sections: list[Section], title: str) -> Figure:
    (found,) = [one for section in sections for one in section.figures if title in one.title]
    return found


def column(found: Figure, name: str) -> list[Any]:
    return [row[found.columns.index(name)] for row in found.rows]


def summary(sections: list[Section]) -> str:
    return "\n".join(text for _, texts in sections[0].items for text in texts)


def one(path: Path) -> Experiment:
    (found,) = experiments(collect([path]))
    return found


def expected_seconds(ranks: int) -> float:
    return 8.0 / ranks + 0.05 * (1 + ranks.bit_length() - 1)


def test_known_speedups_and_efficiencies_come_out(studies: Path) -> None:
    sections = of(studies / "strong")
    found = figure(sections, "Per-epoch speedup")
    for ranks, value, low, high in zip(*(column(found, name) for name in ("ranks", "speedup", "low", "high")), strict=True):
        true = expected_seconds(1) / expected_seconds(ranks)
        assert value == pytest.approx(true, rel=0.05)
        assert low <= value <= high
    efficiency = column(figure(sections, "efficiency"), "efficiency")
    assert efficiency[-1] == pytest.approx(expected_seconds(1) / expected_seconds(8) / 8, rel=0.05)


def test_learning_speedup_is_per_cut_off_and_takes_epochs_into_account(studies: Path) -> None:
    experiment = one(studies / "strong")
    found = figure(of(studies / "strong"), "Learning speedup")
    assert set(column(found, "cut-off")) == {"validation error <= 0.2", "train error <= 0.3"}
    base, four = (next(g for g in experiment.groups if g.ranks == ranks) for ranks in (1, 4))
    target = experiment.targets[0]
    ratio = base.epochs_to(target)[0] / four.epochs_to(target)[0]
    row = next(row for row in found.rows if row[0] == str(target) and row[1] == 4)
    assert row[2] == pytest.approx(expected_seconds(1) / expected_seconds(4) * ratio, rel=0.05)


def test_the_summary_says_what_was_gained_with_interval_repeats_and_warm_up(studies: Path) -> None:
    sections = of(studies / "strong")
    assert re.search(
        r"4 ranks: 3\.\d+ times as fast per epoch as 1 \(3\.\d+ to 3\.\d+; 3 repeats\), efficiency 9\d\s%", summary(sections)
    )
    assert re.search(r"learning speedup 2\.\d+ to validation error <= 0.2 \(2", summary(sections))
    assert "first epoch of a run warms up and is left out" in sections[0].lead[0]
    assert "Every setting has 3 repeats" in sections[0].lead[0]


def test_equal_runs_show_no_difference(tmp_path: Path) -> None:
    for ranks in (1, 2):
        for seed in range(3):
            write_run(tmp_path / f"{ranks}-{seed}", Made(ranks=ranks, seed=seed, work=8.0 * ranks, sync=0.0, noise=0.05))
    assert "2 ranks: no difference shown to 1 per epoch (ratio" in summary(of(tmp_path))


def test_plain_runs_that_differ_in_ranks_are_strong_scaling(tmp_path: Path) -> None:
    for ranks in (1, 2):
        write_run(tmp_path / f"{ranks}", Made(ranks=ranks))
    experiment = one(tmp_path)
    assert experiment.kind == "strong"
    assert [group.label for group in experiment.groups] == ["1 rank", "2 ranks"]
    assert "over its epochs" in summary(of(tmp_path))


def test_plain_runs_that_differ_otherwise_are_settings_and_seeds_are_repeats(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed in (1, 2):
            write_run(tmp_path / f"{rate}-{seed}", Made(seed=seed, config={"optim": {"rate": rate}}))
    experiment = one(tmp_path)
    assert experiment.kind == "settings"
    assert {group.label: len(group.runs) for group in experiment.groups} == {"optim.rate 0.1": 2, "optim.rate 0.2": 2}


def test_plain_runs_of_several_frameworks_are_compared_by_name(tmp_path: Path) -> None:
    """Whatever settings a framework found to be its best: they may differ between repeats."""
    for name, seed in (("jax", 1), ("jax", 2), ("keras", 1)):
        state = {"framework": {"name": name, "version": "1.0", "settings": {"xla": seed == 1}}}
        write_run(tmp_path / f"{name}-{seed}", Made(seed=seed, phases=False, state=state))
    write_run(tmp_path / "own", Made())
    experiment = one(tmp_path)
    assert experiment.kind == "frameworks"
    assert {group.label: len(group.runs) for group in experiment.groups} == {"jax": 2, "keras": 1, "deepex": 1}


def test_runs_of_different_networks_are_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Made())
    write_run(tmp_path / "b", Made(config={"net": "cvae"}, rmse=True))
    assert [e.title for e in experiments(collect([tmp_path]))] == ["lenet on fashion", "cvae on fashion"]
    assert figure(of(tmp_path), "training RMSE")


def test_phases_have_the_shares_that_were_written(studies: Path) -> None:
    found = figure(of(studies / "strong"), "Share of each phase")
    first = dict(zip(found.columns, found.rows[0], strict=True))
    for name, part in SHARES.items():
        assert first[name] == pytest.approx(part * 8.0 / expected_seconds(1), rel=0.05)


def test_weak_efficiency_is_of_the_rate_per_rank(studies: Path) -> None:
    found = figure(of(studies / "weak"), "Weak efficiency")
    assert column(found, "weak efficiency")[-1] == pytest.approx(2.1 / 2.4, rel=0.03)
    assert "86" in summary(of(studies / "weak")) or "87" in summary(of(studies / "weak"))


def test_the_best_sync_setting_is_the_one_with_the_least_time(studies: Path) -> None:
    found = figure(of(studies / "sync"), "Speed of an epoch")
    times = column(found, "seconds to the target")
    best = found.rows[times.index(min(times))][0]
    assert found.sentence.startswith(f"{best} reaches")
    star = found.views[0].traces[1]
    assert star["text"][0].startswith(best)


def test_threads_name_the_best_setting(studies: Path) -> None:
    sections = of(studies / "threads")
    maps = [one for section in sections for one in section.figures if one.title.startswith("Threads")]
    assert len(maps) == 2
    assert "It is the best of all 18 settings" in summary(sections)
    assert "1.7 times as fast" in maps[1].sentence or "1.6" in maps[1].sentence


def test_variability_storage_transfer_and_frameworks(studies: Path) -> None:
    by_run = figure(of(studies / "variability"), "by run")
    assert len(by_run.rows) == 10
    rates = figure(of(studies / "storage"), "Samples per second")
    assert rates.rows[0][2] == pytest.approx(60_000 / (6.0 / 2 + 0.1), rel=0.05)
    assert rates.rows[0][1] < rates.rows[0][2]
    bandwidth = figure(of(studies / "transfer"), "Bandwidth")
    nccl = max(row[2] for row in bandwidth.rows if "nccl" in row[0])
    assert nccl == pytest.approx(1.2e11, rel=0.15)
    assert [view.label for view in bandwidth.views] == ["host-device", "point-to-point", "all-reduce"]
    assert [len(view.traces) for view in bandwidth.views] == [1, 1, 2]
    assert "nccl" in bandwidth.sentence, "the best of its kind"
    assert "all-reduce mpi" not in bandwidth.sentence
    lines = of(studies / "transfer")[-1].closing[0]
    assert lines.rows[1] == ["rank-rank mpi", "1\xa0µs", "9\xa0GB/s", "20\xa0%", "as it is"]
    sections = of(studies / "frameworks")
    table = next(table for section in sections for table in section.tables if table.title == "Frameworks")
    assert [row[0] for row in table.rows] == ["deepex", "pytorch-ddp", "lightning", "jax", "keras"]
    assert "pytorch-ddp" not in json.dumps([one.rows for s in sections for one in s.figures if "phase" in one.title])


def test_the_fastest_is_held_against_the_next_and_the_slowest(studies: Path) -> None:
    """The next is the harder comparison; a summary that left it out would flatter."""
    text = summary(of(studies / "frameworks"))
    assert "deepex has the shortest epoch of 5" in text
    next_, slowest = (
        re.search(rf"against {name}: faster by ([\d.]+)", text) or re.search(rf"against {name}: ([\d.]+) times", text)
        for name in ("pytorch-ddp, the next", "keras, the slowest")
    )
    assert next_ is not None
    assert slowest is not None
    assert 25 < float(next_[1]) < 45
    assert 2.3 < float(slowest[1]) < 2.8


def test_ranks_that_share_cores_are_told(tmp_path: Path) -> None:
    """96 cores to a node: no speedup survives more ranks than that."""
    for ranks, hosts in ((1, ("a",)), (192, ("a", "b")), (128, ("a",))):
        state = {"device": "cpu", "threads": 1}
        write_run(tmp_path / f"{ranks}", Made(ranks=ranks, epochs=3, hosts=hosts, state=state))
    text = summary(of(tmp_path))
    assert "128 ranks (sharing 96 cores): " in text
    assert "192 ranks: " in text


def test_maps_of_threads_have_one_scale(studies: Path) -> None:
    maps = [one for section in of(studies / "threads") for one in section.figures if "Threads × ranks" in one.title]
    assert len(maps) > 1
    assert len({(one.views[0].traces[0]["zmin"], one.views[0].traces[0]["zmax"]) for one in maps}) == 1
    shortest = [min(row[-1] for row in one.rows) for one in maps]
    assert shortest == sorted(shortest), "the best kernels come first"
    assert shortest[0] == maps[0].views[0].traces[0]["zmin"]


def test_what_a_phase_of_next_to_no_time_used_is_not_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", Made(ranks=1))
    lines = [json.loads(text) for text in (path / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["phases"]["sync"] = [0.0001]
        line["usage"] = {"cpu_seconds": {name: [2 * values[0] + 0.001] for name, values in line["phases"].items()}}
    (path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    cores = figure(of(tmp_path), "Cores busy")
    assert [row[0] for row in cores.rows] == ["all runs"]
    assert "sync" not in cores.columns
    assert column(cores, "input") == pytest.approx([2.0], rel=0.05)


def test_of_very_many_bars_some_are_drawn_and_the_axis_says_so() -> None:
    """A browser took a minute to draw a thousand, with their names."""
    names = [f"rate {at}" for at in range(1000)]
    found = [Interval(value=float(at), low=at - 1.0, high=at + 1.0, repeats=3) for at in range(1000)]
    view, height = bar_view(names, [Bars(name="", values=[one.value for one in found], intervals=found)], axis="joules")
    (trace,) = view.traces
    assert (trace["x"][0], trace["x"][-1]) == (0.0, 999.0)
    assert [len(trace[key]) for key in ("x", "y", "customdata")] == [40, 40, 40]
    assert len(trace["error_x"]["array"]) == 40
    assert "40 of 1,000 are drawn" in view.layout["xaxis"]["title"]["text"]
    assert height <= 1100


def test_two_settings_are_held_against_each_other(tmp_path: Path) -> None:
    for rate, work in ((0.1, 8.0), (0.2, 4.0)):
        write_run(tmp_path / f"{rate}", Made(work=work, config={"optim": {"rate": rate}}))
    assert "optim.rate 0.2 has the shortest epoch of 2" in summary(of(tmp_path))
    assert "against optim.rate 0.1, the other: " in summary(of(tmp_path))
    assert "; 1 run, over its epochs)" in summary(of(tmp_path))


def test_storage_tells_what_was_in_the_cache_before(tmp_path: Path) -> None:
    folder = storage(tmp_path / "storage")
    runs = sorted((folder / "runs").iterdir())
    cold = {"host": True, "device": False}
    for path in runs:
        placement = next((name for name in cold if path.name.startswith(name)), None)
        if placement is not None:
            write_json(path / "page_cache.json", {"cold": cold[placement]})
        for line in [json.loads(text) for text in (path / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]:
            line["usage"] = {"opens": {"input": [2.0, 2.0]}, "data_bytes": {"input": [1e6, 1e6]}}
            with (path / "new.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        (path / "new.jsonl").replace(path / "epochs.jsonl")
    table = next(table for section in of(folder) for table in section.closing if table.title.startswith("Files opened"))
    told = {(row[0].partition(",")[0], row[-1]) for row in table.rows}
    assert told == {("host", "no"), ("device", "yes"), ("stream", "not known")}


def test_utilisation_of_a_whole_epoch_counts_its_validation(tmp_path: Path) -> None:
    """What is sampled without phases has validation in it; the time must have it too, or a GPU would be busy for more than all."""
    path = write_run(tmp_path / "a", Made(ranks=2, work=1.0))
    lines = [json.loads(text) for text in (path / "epochs.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["usage"] = {"gpu_busy_seconds": {"epoch": [0.5 * (wall + 0.3) for wall in line["wall"]]}}
    (path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    busy = figure(of(tmp_path), "GPU busy")
    assert column(busy, "epoch") == pytest.approx([0.5])
    assert "phases are not told apart" in busy.sentence


def test_utilisation_energy_and_drift(studies: Path) -> None:
    sections = of(studies / "strong")
    cores = figure(sections, "Cores busy")
    assert column(cores, "forward") == pytest.approx([3.6] * 4)
    energy = figure(sections, "Energy")
    assert column(energy, "joules per epoch")[0] == pytest.approx(300 * expected_seconds(1), rel=0.05)
    assert figure(sections, "Drift").rows[0][2] == pytest.approx(0.02)


def test_predicted_points_are_marked(tmp_path: Path) -> None:
    for ranks in (1, 2, 64):
        write_run(tmp_path / f"{ranks}", Made(ranks=ranks, measured=ranks < 64))
    found = figure(of(tmp_path), "Per-epoch speedup")
    symbols = found.views[0].traces[1]["marker"]["symbol"]
    assert [name.endswith("-open") for name in symbols] == [False, False, True]
    assert "predicted, not measured" in found.sentence
    assert "64 ranks (predicted)" in summary(of(tmp_path))


def test_a_slow_rank_is_named_with_what_mending_it_saves(tmp_path: Path) -> None:
    delays = {(2, epoch): ("input", 1.0) for epoch in range(1, 11)}
    write_run(tmp_path / "run", Made(ranks=4, epochs=10, delays=delays, hosts=("node17", "node18")))
    section = of(tmp_path)[-1]
    assert section.title == "Who is slow"
    (row,) = section.tables[0].rows
    assert row[1:5] == [2, "node18", "input", "chronic"]
    assert re.fullmatch(r"9\d\d\sms|1(\.0\d)?\ss", row[7])


def test_failures_unfinished_and_damaged_runs_are_listed_with_reasons(tmp_path: Path) -> None:
    write_run(tmp_path / "good", Made())
    write_run(tmp_path / "failed", Made(), status="failed", reason="rank 3: out of memory")
    write_run(tmp_path / "running", Made(epochs=2), status="running", reason="")
    write_run(tmp_path / "damaged", Made())
    (tmp_path / "damaged/epochs.jsonl").write_text('{"epoch": 1}\n')
    report = make_report([tmp_path])
    assert (report.runs, report.problems) == (2, 3)
    assert "out of memory" in report.html
    assert "line 1 is damaged" in report.html


def test_a_study_that_has_begun_is_reported(tmp_path: Path) -> None:
    strong(tmp_path / "strong", ranks=(1, 2))
    lost = tmp_path / "strong/runs/2-r3"
    for path in sorted(lost.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    lost.rmdir()
    problems = collect([tmp_path]).problems
    assert [(p.name, p.status) for p in problems] == [("strong/2-r3", "open")]


def test_a_run_is_counted_once_however_often_it_is_given(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Made())
    assert len(collect([tmp_path, tmp_path / "a"]).all_runs()) == 1


def test_directories_without_runs_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing does not exist; give run or study directories"):
        make_report([tmp_path / "missing"])
    with pytest.raises(RunError, match=r"holds no run\.json or study\.json"):
        make_report([tmp_path])
    write_run(tmp_path / "empty", Made(epochs=0), status="failed", reason="no data")
    with pytest.raises(RunError, match=r"nothing to report in .*: what failed or has no whole epoch is left out \(empty: no data"):
        make_report([tmp_path])


def test_the_command_writes_the_file_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Made())
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"{out}: [\d.]+\s[kM]B, 1 run\n", result.output)
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "a"), "-o", str(out), "--title", "For a <proposal>"]).exit_code == 0
    assert "<h1>For a &lt;proposal&gt;</h1>" in out.read_text(encoding="utf-8")
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "-o", str(tmp_path)])
    assert isinstance(refused.exception, RunError)
    assert "is a directory" in str(refused.exception)


def test_names_that_are_alike_once_cut_keep_bars_of_their_own() -> None:
    labels = [f"{'a very long name ' * 5}{end}" for end in "abc"]
    view, _ = bar_view(labels, [Bars(name="", values=[1.0, 2.0, 3.0])], axis="seconds")
    (trace,) = view.traces
    assert trace["y"] == [0, 1, 2]
    assert trace["customdata"] == labels


def test_hostile_strings_are_text_in_the_page(hostile_page: Path) -> None:
    html = hostile_page.read_text(encoding="utf-8")
    assert "<img" not in html
    assert "<b>" not in html
    assert html.count("</script>") == 3
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert data
    traces = [t for entry in json.loads(data[1]).values() for view in entry["views"] for t in view["traces"]]
    labels = json.dumps([[t.get("name"), t.get("x"), t.get("y"), t.get("text"), t.get("customdata")] for t in traces])
    assert "<img" not in labels
    assert "<b>" not in labels
    assert "&lt;" in labels


def test_a_page_is_small_and_loads_nothing(full_page: Path) -> None:
    html = full_page.read_text(encoding="utf-8")
    assert len(html) < 6_000_000
    without_library = re.sub(r'id="library">.*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", without_library)
    assert "default-src 'none'" in html


def test_every_figure_has_words_numbers_and_an_alternative(studies: Path) -> None:
    figures = [one for section in of(studies) for one in section.figures]
    assert len(figures) > 35
    for found in figures:
        assert found.sentence.endswith(".")
        assert len(found.alt) > 40
        assert found.rows
        assert all(len(row) == len(found.columns) for row in found.rows)
        assert all(len(trace.get("x", trace.get("y", []))) <= 400 for view in found.views for trace in view.traces)


def test_a_thousand_runs_fit_into_one_small_page(tmp_path: Path) -> None:
    """A sample is written, the rest are links to it: what counts is reading and rendering a thousand."""
    for seed in range(8):
        write_run(tmp_path / f"made/{seed}", Made(ranks=2 ** (seed % 4), seed=seed, epochs=4))
    (tmp_path / "runs").mkdir()
    for at in range(1000):
        folder = tmp_path / f"runs/{at:04}"
        folder.mkdir()
        for name in ("run.json", "config.toml", "machine.json", "epochs.jsonl"):
            (folder / name).symlink_to(tmp_path / f"made/{at % 8}/{name}")
    report = make_report([tmp_path / "runs"])
    assert report.runs == 1000
    assert len(report.html) < 3_000_000


def test_numbers_as_people_write_them() -> None:
    assert [number(v) for v in (0, 0.012345, 3.14159, 1234567, 1200, 2.0)] == ["0", "0.0123", "3.14", "1.23e+06", "1,200", "2"]
    assert [seconds(v).replace("\u00a0", " ") for v in (2e-6, 0.0123, 4.0, 1200, 90_000)] == [
        "2 µs",
        "12.3 ms",
        "4 s",
        "20 min",
        "25 h",
    ]
    assert (size(94e6), share(0.725), share(0.0062)) == ("94\u00a0MB", "72\u00a0%", "0.62\u00a0%")


def test_thinning_keeps_the_ends() -> None:
    points = thin(list(range(5000)))
    assert (len(points), points[0], points[-1]) == (200, 0, 4999)
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5


def test_json_cannot_leave_its_element() -> None:
    text = str(safe_json({"a": HOSTILE, "b": float("nan"), "c": [1.23456789]}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": HOSTILE, "b": None, "c": [1.23457]}


def test_anchors_differ_and_labels_are_plain() -> None:
    assert slug("A <b> title", {"a-b-title"}) == "a-b-title-2"
    assert plain("<b>&") == "&lt;b&gt;&amp;"
