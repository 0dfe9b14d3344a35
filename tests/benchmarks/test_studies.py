"""What the studies of learning compute from their trials, and that a trial is a real run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deepex
import learning
import periods
import trials
from deepex.sync.config import SyncConfig
from tests.full import in_full
from tests.mpi import ROOT
from trials import Epoch, Trial


def made(
    name: str, losses: list[float], *, workload: str = "pf", seed: int = 1, steps: int = 60, syncs: int = 1, **set_: Any
) -> Trial:
    """A trial that has had these measures, in training and validation alike."""
    epochs = [Epoch(loss, loss, steps, syncs, 0.1, 1.0) for loss in losses]
    return Trial(
        workload=workload, name=name, seed=seed, recipe=workload, measure="loss", changes=set_, samples=9600, epochs=epochs
    )


# Trials.


def tiny(**changes: Any) -> Trial:
    settings = {"net": "lenet", "batch": 100, "epochs": 3, "threads": 1, "replicas": 2, "sync.period": 5, **changes}
    return Trial(workload="some", name="tiny", seed=7, recipe="fashion", measure="error", changes=settings)


@in_full
@pytest.mark.slow
def test_a_trial_tells_what_its_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same run: where sums depend on where memory lies, another one learns a little else."""
    train, runs = deepex.train, []
    monkeypatch.setattr(deepex, "train", lambda *words, **named: runs.append(train(*words, **named).epochs()))
    trials._run_here(tiny(), tmp_path / "told.json", math.inf)
    found = Trial.from_json(json.loads((tmp_path / "told.json").read_text()))
    (epochs,) = runs
    assert [epoch.train for epoch in found.epochs] == pytest.approx([epoch.train.get("error") for epoch in epochs], rel=1e-4)
    held = [epoch.validation.get("error") for epoch in epochs]
    assert [epoch.validation for epoch in found.epochs] == pytest.approx(held, rel=1e-4)
    assert [epoch.drift for epoch in found.epochs] == pytest.approx([epoch.drift["all"] for epoch in epochs], rel=0.01)
    assert epochs[0].train.get("error") > epochs[2].train.get("error"), "and it has learnt"


@pytest.mark.slow
def test_a_trial_is_run_as_it_was_asked_for() -> None:
    (found,) = trials.run([tiny()], jobs=1)
    assert [(epoch.steps, epoch.syncs) for epoch in found.epochs] == [(30, 6)] * 3
    assert (found.samples, found.outer, found.note) == (6000, "none", "")
    assert Trial.from_json(json.loads(json.dumps(found.to_json()))).asked() == found.asked() == tiny()


@in_full
@pytest.mark.slow
def test_a_trial_answers_who_asks_for_its_settings_and_not_if_time_cut_it_short() -> None:
    done = replace(tiny(data="here"), epochs=[Epoch(0.5, 0.5, 30, 6, 0.1, 1.0)])
    assert done.answers(tiny(data="there"))
    assert not done.answers(tiny(batch=50))
    (cut,) = trials.run([tiny(epochs=500)], jobs=1, limit=0.5)
    assert cut.cut
    assert not cut.answers(tiny(epochs=500))


@in_full
@pytest.mark.slow
def test_a_run_that_diverges_is_a_result_and_one_that_cannot_begin_says_why() -> None:
    wild, lost = trials.run([tiny(**{"optim.rate": 1e6}), tiny(data="nowhere")], jobs=1)
    assert wild.note.startswith("DivergedError")
    assert "nowhere" in lost.note


def test_a_trial_whose_process_dies_is_no_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In its third step, which is in its second epoch."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TROUBLE", "die")
    monkeypatch.setenv("TROUBLED_RANK", "0")
    changes = {"net": "tests.networks:troubled", "batch": 3000, "replicas": 1, "validate": "none", "layout": "contiguous"}
    assert not list(trials.run([tiny(**changes)], jobs=1))
    assert "ended with code" in capsys.readouterr().out


@pytest.mark.slow
def test_after_the_limit_a_trial_ends_with_its_epoch_and_no_other_begins() -> None:
    (found,) = trials.run([tiny(epochs=500), tiny()], jobs=1, limit=0.5)
    assert 1 <= len(found.epochs) < 500
    assert found.note == "ended for want of time"


# Learning speedup.


def test_every_setting_of_the_plan_is_one() -> None:
    for trial in learning.planned(learning.PLAN, {"atomai": "sample:atomai", "pf": "sample:pf"}, [1, 2]):
        deepex.recipe(trial.recipe, trial.changes)
    assert {row["replicas"] for row in learning.PLAN if row["name"] == "paper"} == set(learning.REPLICAS)
    assert not learning.planned(learning.PLAN, {}, [1]), "only what there is data for"


@pytest.mark.parametrize("text", [None, "[{", "{}", "[3]", '[{"workload": "pf"}]'])
def test_a_plan_that_is_none_says_what_one_is(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="a plan is a JSON list of tables with workload, name, replicas and set"):
        learning.read_plan(path)


def test_a_plan_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(learning.PLAN))
    assert learning.read_plan(tmp_path / "plan.json") == learning.PLAN


def test_a_sync_between_nodes_costs_more_and_depends_little_on_their_number() -> None:
    sync = learning.SUMMIT.sync_seconds
    assert sync(1e8, 1) == 0
    assert sync(1e8, 6) < sync(1e8, 12) < sync(1e8, 1536) < 2 * sync(1e8, 12)
    assert learning.MACHINES["Summit, sync as in the paper"].sync_seconds(1e8, 1536) == 0.30
    assert sync(1e8, 6) == pytest.approx(2 * 1e8 * 5 / 6 / 50e9 / 0.9, rel=0.1), "a ring in the node"


def test_seconds_of_an_epoch() -> None:
    machine = learning.Machine(gpus=1, inside=1.0, between=1e9, share=1.0, latency=0.0)
    speed = {"step_seconds": {"8": 0.1, "16": 0.3}, "outer_seconds": 0.5}
    plain = made("a", [1.0], syncs=3, batch=12, replicas=2)
    sync = 2 * 4e6 * learning.TASKS["pf"].weights / 2 / 1e9
    assert learning.epoch_seconds(machine, plain, speed) == pytest.approx(60 * 0.2 + 3 * sync)
    muon = replace(plain, outer="muon")
    assert learning.epoch_seconds(machine, muon, speed) == pytest.approx(60 * 0.2 + 3 * (sync + 0.5))
    assert learning.step_seconds(speed["step_seconds"], 4) == 0.1, "no step is shorter than the shortest that was measured"
    assert learning.step_seconds(speed["step_seconds"], 32) == pytest.approx(0.6)


def test_each_epoch_is_as_long_as_its_own_syncs_make_it() -> None:
    machine = learning.Machine(gpus=1, inside=1.0, between=1e9, share=1.0, latency=0.0)
    epochs = [Epoch(error, error, 60, syncs, 0.1, 1.0) for error, syncs in ((2.0, 30), (1.0, 10), (0.5, 1))]
    auto = replace(made("auto", [], batch=8, replicas=2), epochs=epochs)
    sync = 4e6 * learning.TASKS["pf"].weights / 1e9
    times = learning.times_to(machine, [auto], 1.0, {"step_seconds": {"8": 0.1}, "outer_seconds": 0.5})
    assert times == pytest.approx([2 * 60 * 0.1 + 40 * sync])


def test_rows_compare_with_the_best_of_one_gpu_and_the_paper_with_itself() -> None:
    machine = learning.Machine(
        gpus=1, inside=1.0, between=math.inf, share=1.0, latency=0.0, rates={"pf": 100.0}, least_steps={"pf": 0.0}
    )
    found = [
        made("paper", [9.0, 5.0, 1.1, 1.0], steps=75, batch=128, replicas=1),
        made("sgd", [1.1, 1.0], steps=300, batch=32, replicas=1),
        made("paper", [9.0, 9.0, 9.0], steps=5, batch=128, replicas=32),
        made("muon", [5.0, 1.15, 1.05], steps=10, batch=32, replicas=32),
        made("muon", [5.0, 4.0, 1.15], steps=10, batch=32, replicas=32, seed=2),
    ]
    assert learning.cut_offs(learning.TASKS["pf"], found) == pytest.approx((1.2, 1.1))
    rows = {(row[0], row[1], row[2]): row[3:] for row in learning.rows("pf", machine, found, {})}
    paper, epoch = 75 * 1.28, 300 * 0.32
    assert rows[1, "paper", "20%"] == ["3", f"{3 * paper:.3g}", "1", "1.0 (1.0-1.0)"]
    assert rows[32, "paper", "20%"][0] == "> 3"
    assert rows[32, "paper", "20%"][2] == "15", "75 steps over 5"
    ours = 10 * 0.32
    assert rows[32, "muon", "20%"] == ["2 3", f"{2.5 * ours:.3g}", f"{epoch / ours:.4g}", f"{epoch / ours / 2.5:.1f} (10.0-15.0)"]
    assert rows[32, "muon", "10%"][0] == "> 3", "one seed did not come there"


# Periods.


def test_epochs_and_time_to_a_target() -> None:
    one = made("weights 4", [2.0, 1.0, 1.5, 0.5], syncs=15)
    assert periods.reached(one, 1.5, 0.0) == (1.5, 1.5), "half way between the first two"
    assert periods.reached(one, 0.75, 0.0) == (3.5, 3.5), "from the least so far"
    assert periods.reached(one, 0.75, 4.0) == (3.5, 7.0), "15 syncs of 4 steps, as long as the 60 steps"
    assert periods.reached(one, 2.5, 0.0) == (1.0, 1.0)
    assert periods.reached(one, 0.1, 0.0) == (math.inf, math.inf)


def test_what_a_sync_costs() -> None:
    epoch = Epoch(1.0, 1.0, 60, 6, 0.1, 1.0)
    assert periods.sync_costs(made("weights", []), epoch, 8.0) == 48
    assert periods.sync_costs(made("s", [], **{"sync.strategy": "streaming"}), epoch, 8.0) == 5 * 2 + 8
    background = made("b", [], **{"sync.strategy": "background"})
    assert periods.sync_costs(background, epoch, 8.0) == 5 * 0.15 * 1 + 8, "10 steps hide 1"
    assert periods.sync_costs(background, epoch, 104.0) == 5 * (3 + 0.15 * 10) + 104, "and 10 of 13"
    assert periods.sync_costs(made("o", [], **{"sync.momentum": "local"}), epoch, 8.0) == 24
    assert SyncConfig().parts == periods.PARTS


def test_auto_is_judged_by_the_best_fixed_period() -> None:
    def both(name: str, losses: list[float], syncs: int) -> list[Trial]:
        return [made(name, losses, seed=seed, syncs=syncs, workload="lenet-5") for seed in (1, 2)]

    fixed = both("weights 1", [2.0, 1.0], 60) + both("weights 16", [3.0, 2.5, 1.0], 4)
    found = fixed + [one for cost in periods.COSTS for one in both(f"auto at {cost:g}", [2.0, 1.0], 15)]
    assert periods.targets(periods.settings("lenet-5", found, "weights ")) == pytest.approx([1.3, 1.15])
    first = periods.judged("lenet-5", found)[0]
    assert first[:4] == ["lenet-5", "3", "70%", "16"]
    best, mine = 2.8 * (1 + 3 * 4 / 60), 1.7 * (1 + 3 * 15 / 60)
    assert [float(str(cell)) for cell in first[4:6]] == pytest.approx([best, mine], abs=0.01)
    assert str(first[6]).startswith(f"{mine / best:.2f} ")
    assert periods.overall("lenet-5", found) > 0


def test_a_target_that_no_fixed_period_comes_to_with_all_seeds_is_not_judged() -> None:
    def both(name: str, first: list[float], second: list[float], syncs: int) -> list[Trial]:
        return [made(name, losses, seed=seed, syncs=syncs, workload="lenet-5") for seed, losses in ((1, first), (2, second))]

    fixed = both("weights 1", [2.0, 0.5], [2.0, 1.1], 60) + both("weights 16", [2.0, 1.1], [2.0, 0.5], 4)
    found = fixed + [one for cost in periods.COSTS for one in both(f"auto at {cost:g}", [2.0, 0.5], [2.0, 0.5], 4)]
    ratios = [float(str(row[6]).split()[0]) for row in periods.judged("lenet-5", found)]
    assert [bool(ratio) for ratio in ratios] == [True, False, True, False], "85 % of the way is not judged"
    assert periods.overall("lenet-5", found) == pytest.approx(math.sqrt(ratios[0] * ratios[2]))


def test_a_workload_is_shown_when_all_its_trials_are_there() -> None:
    found = periods.sweep("lenet-5", 0.03, [1, 2])
    assert periods.complete("lenet-5", found)
    assert not periods.complete("lenet-5", found[:-1])
    assert not periods.complete("lenet-5", found[:1])
    assert not periods.complete("lars", found)


def test_background_is_compared_with_weights_that_are_sent_as_often() -> None:
    """Seed by seed, and only where both have the same ones."""
    losses = {"weights 1": 2.0, "weights 8": 1.0, "weights 16": 1.2, "weights 32": 1.5, "background 2": 1.1, "background 4": 0.9}
    found = [made(name, [4.0, least, 3.0], seed=seed, workload="lenet-5") for name, least in losses.items() for seed in (1, 2)]
    rows = periods.late("lenet-5", found)
    assert [row[1:4] for row in rows] == [[2, 8, "0.5"], [2, 16, "1"], [4, 16, "0.5"], [4, 32, "1"]]
    assert rows[0][4:7] == ["1.000", "1.100", "+10.0% (+10.0% to +10.0%)"]
    assert rows[3][4:7] == ["1.500", "0.900", "-40.0% (-40.0% to -40.0%)"]
    assert rows[0][7:] == ["1.7 / 1.9", "1.7 / 1.9"], "1.9 and 1.45 of a loss that falls from 4 to 1, or to 1.1"
    assert periods.late("lenet-5", found[:-1]) == rows[:2]


def test_periods_run_again_what_time_cut_short_and_what_is_asked_for(tmp_path: Path) -> None:
    assert periods.held(tmp_path / "none.json", ["lenet-5"], None) == []
    whole, late, other = (made(name, [4.0, 1.0], workload="lenet-5") for name in ("weights 1", "background 2", "auto at 3"))
    record = [
        whole,
        replace(late, note="ended for want of time"),
        replace(other, note="DivergedError: 5"),
        replace(other, workload="plain"),
    ]
    (tmp_path / "periods.json").write_text(json.dumps({"trials": [one.to_json() for one in record]}))
    assert periods.held(tmp_path / "periods.json", ["lenet-5"], None) == [record[0], *record[2:]]
    assert periods.held(tmp_path / "periods.json", ["lenet-5"], "auto") == [record[0], record[3]]


def test_auto_in_the_background_is_compared_with_auto() -> None:
    names = ["weights 1", *(f"{kind}auto at {cost:g}" for kind in ("", "background ") for cost in periods.COSTS)]
    found = [made(name, [4.0, 1.0], seed=seed, syncs=5, workload="lenet-5") for name in names for seed in (1, 2)]
    found = [replace(one, changes={"sync.strategy": "background"}) if one.name.startswith("back") else one for one in found]
    rows = periods.hidden("lenet-5", found)
    assert [row[:3] for row in rows] == [["lenet-5", cost, share] for cost in ("3", "30") for share in ("70%", "85%")]
    waits, hides = 1.7 * (1 + 30 * 5 / 60), 1.7 * (1 + (30 + 4 * 0.15 * 30 / 8) / 60)
    ratio = f"{hides / waits:.2f} ({hides / waits:.2f}-{hides / waits:.2f})"
    assert rows[2][3:] == [f"{waits:.2f}", f"{hides:.2f}", "nan", ratio, "weights"], "epochs are short"
    assert periods.chooses("lenet-5", 1000, 10.0) == "background"
    assert periods.chooses("plain", 1000, 10.0) == "weights", "it has no momentum"
    assert len(periods.hidden("lenet-5", found[:-1])) == 2


def test_muon_is_shown_beside_means_at_each_step() -> None:
    losses = {"weights 1": [3.0, 2.0, 1.0], "weights 4": [3.0, 2.0, 1.5], "muon": [2.0, 1.45, 1.9]}
    found = [made(name, each, workload="long mlp", seed=seed) for name, each in losses.items() for seed in (1, 2)]
    weights, muon = periods.muon("long mlp", found)  # to losses of 1.6 and 1.3
    assert weights == ["long mlp", "weights 1", "2.4, 2.4", "2.7, 2.7", "1.000", "1.000"]
    assert muon == ["long mlp", "muon", "1.7, 1.7", "inf, inf", "1.450", "1.900"]
    assert periods.muon("long mlp", found[:-2]) == [weights]


def test_rate_that_was_tuned_and_trials_that_follow() -> None:
    tried = [made(f"rate {rate:g}", [loss], workload="lenet", **{"optim.rate": rate}) for rate, loss in ((0.01, 0.5), (0.03, 0.4))]
    assert periods.tuned_rate("lenet", tried) == 0.03
    for name in periods.WORKLOADS:
        asked = periods.sweep(name, 0.03, [1, 2])
        assert len({one.key for one in asked}) == len(asked)
        for one in [*periods.tuning(name), *asked]:
            deepex.recipe(one.recipe, one.changes)


def test_plot_of_the_frontier(tmp_path: Path) -> None:
    found = [
        made(f"{name} {period}", [2.0, 1.5 - 0.1 * k, 1.0], workload="frontier", replicas=16, syncs=1 + k)
        for name in periods.STRATEGIES
        for k, period in enumerate(periods.FRONTIER_PERIODS)
    ]
    rows = periods.frontier(found)
    assert len(rows) == len(found)
    assert rows[0][3] == pytest.approx(16 / (1 + 10 / 60))
    assert rows[0][4] == pytest.approx(rows[0][3] / rows[0][2])
    periods.plot(rows, tmp_path / "frontier.svg")
    assert "adacomm" in (tmp_path / "frontier.svg").read_text(encoding="utf-8")
