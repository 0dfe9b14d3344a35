"""Plans: what each kind varies, in which turns, with which settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepex.errors import ConfigError, UnknownName
from deepex.record import PlannedRun
from deepex.study.estimate import Cost
from deepex.study.frameworks import available
from deepex.study.kinds import Frameworks, Kind, Storage, Strong, Sync, Threads, Transfer, Variability, Weak
from deepex.study.plan import Request, hardest, make_plan, open_subject


def plan(kind: Kind, **options: object) -> list[PlannedRun]:
    request = Request(**{"recipe": "fashion", **options})  # type: ignore[arg-type]
    return make_plan(kind, open_subject(request), request)


def settings(planned: PlannedRun) -> dict[str, str]:
    words = planned.command
    return dict(words[k + 1].split("=", 1) for k, word in enumerate(words) if word == "--set")


def test_turns_go_forth_and_back_each_with_its_seed() -> None:
    runs = plan(Strong(ranks=(4, 1, 2)), repeats=3)
    assert [(run.ranks, run.repeat) for run in runs] == [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2), (1, 3), (2, 3), (4, 3)]
    assert [settings(run)["seed"] for run in runs] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert len({run.name for run in runs}) == 9


def test_steps_are_run_as_in_a_long_training_unless_the_user_says_how() -> None:
    assert {settings(run)["step"] for run in plan(Strong(ranks=(1, 2)))} == {"fastest"}
    assert {settings(run)["step"] for run in plan(Strong(ranks=(1, 2)), settings=("step=auto",))} == {"auto"}


def test_every_rank_has_as_many_threads_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepex.study.plan.describe_cpu", lambda: {"num_cores_usable": 8})
    assert {settings(run)["threads"] for run in plan(Strong(ranks=(1, 2, 4)))} == {"2"}
    assert {settings(run)["threads"] for run in plan(Strong(ranks=(1, 2, 4)), settings=("threads=3",))} == {"3"}


def test_a_total_batch_is_shared() -> None:
    runs = plan(Strong(ranks=(1, 2, 4), total_batch=64), repeats=1)
    assert [settings(run)["batch"] for run in runs] == ["64", "32", "16"]
    with pytest.raises(ConfigError, match=r"--total-batch is 66; .* of 4"):
        Strong(ranks=(1, 2, 4), total_batch=66)


def test_data_grows_with_the_ranks() -> None:
    runs = plan(Weak(ranks=(1, 2, 4)), repeats=1)
    assert [(run.ranks, settings(run)["samples"]) for run in runs] == [(1, "1500"), (2, "3000"), (4, "6000")]


def test_the_batch_grows_with_the_ranks_and_gradients_are_averaged() -> None:
    runs = plan(Weak(ranks=(1, 4), grow="batch"), repeats=1)
    assert [run.varied for run in runs] == [{"ranks": 1, "batch": 32}, {"ranks": 4, "batch": 128}]
    assert {settings(run)["sync.strategy"] for run in runs} == {"gradients"}
    own = plan(Weak(ranks=(1, 4), grow="batch"), settings=("sync=weights",))
    assert all("sync.strategy" not in settings(run) for run in own)


def test_strategies_with_a_period_have_each_of_them() -> None:
    runs = plan(Sync(ranks=4, strategies=("gradients", "weights"), periods=("1", "2 per epoch")), repeats=1)
    assert [tuple(run.varied.values()) for run in runs] == [
        ("one rank", ""),
        ("gradients", ""),
        ("weights", "1"),
        ("weights", "2 per epoch"),
    ]
    assert [run.ranks for run in runs] == [1, 4, 4, 4]
    assert runs[-1].name == "strategy-weights_period-2-per-epoch_repeat-1"
    assert settings(runs[-1])["sync.period"] == "2 per epoch"


def test_threads_and_ranks_that_fit_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepex.study.plan.describe_cpu", lambda: {"num_cores_usable": 4})
    pairs = {(run.varied["threads"], run.varied["ranks"]) for run in plan(Threads())}
    assert pairs == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert len(plan(Threads(), repeats=1)) == 4 * len(pairs)
    with pytest.raises(ConfigError, match=r"fits on 4 core\(s\)"):
        plan(Threads(threads=(8,)))
    assert plan(Threads(threads=(8,), ranks=(1,), crowd=True))


def test_repeats_of_a_seed_differ_in_nothing() -> None:
    runs = plan(Variability(ranks=2, seeds=2), repeats=2, settings=("seed=7",))
    assert sorted({settings(run)["seed"] for run in runs}) == ["7", "8"]
    assert len({run.command for run in runs}) == 2


def test_how_long_runs_train() -> None:
    assert settings(plan(Strong())[0])["epochs"] == "4"
    assert settings(plan(Strong(), epochs=9)[0])["epochs"] == "9"
    assert settings(plan(Strong(), settings=("epochs=2",))[0])["epochs"] == "2"
    to_target = settings(plan(Strong(), targets=("validation error <= 0.3", "validation error <= 0.2"))[0])
    assert (to_target["epochs"], to_target["target"]) == ("6", "validation error <= 0.2")
    assert settings(plan(Sync())[0])["epochs"] == "6"


def test_targets_of_different_measures_stop_no_run() -> None:
    assert hardest(["loss <= 1", "error <= 0.1"]) is None
    assert hardest([]) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(recipe="fashion", repeats=0), r"--repeats is 0; it must be at least 1"),
        (lambda: Request(recipe="fashion", targets=("eror under 1",)), r"target is 'eror under 1'; it must be"),
        (
            lambda: open_subject(Request(recipe="fashion", targets=("eror < 1",))),
            r"target is 'train eror <= 1.0', but the task classify measures",
        ),
        (lambda: Strong(ranks=(1, 1)), r"--ranks is '1,1'"),
        (lambda: Weak(ranks=(0, 1)), r"--ranks is '0,1'"),
        (lambda: Sync(ranks=1), r"--ranks is 1; how replicas agree"),
        (lambda: Variability(seeds=0), r"--seeds is 0"),
        (lambda: open_subject(Request(recipe="nothing.toml")), r"nothing.toml does not exist"),
    ],
)
def test_mistakes(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_names_are_fit_for_files() -> None:
    runs = plan(Sync(strategies=("weights",), periods=("1 until 5 then 16", "../x")))
    assert all(Path(run.name).name == run.name for run in runs)


def test_an_estimate_follows_ranks_threads_epochs_and_samples() -> None:
    cost = Cost(start_seconds=2.0, sample_seconds=0.01, samples=6000, validated=0, cores=4)
    one, two, four = (run for run in plan(Weak(ranks=(1, 2, 4)), repeats=1, settings=("threads=1",), epochs=3))
    assert [cost.seconds(run) for run in (one, two, four)] == [pytest.approx(2 + 3 * 15.0)] * 3
    crowded = plan(Strong(ranks=(1, 8)), repeats=1, settings=("threads=1",), epochs=1)[1]
    assert cost.seconds(crowded) == pytest.approx(2 * 2 + 60 / 4)


def test_each_communicator_is_measured_on_all_ranks() -> None:
    runs = plan(Transfer(ranks=4, comms=("mpi", "gloo"), sizes=(8, 64)), repeats=1)
    assert [run.varied for run in runs] == [{"comm": "mpi"}, {"comm": "gloo"}]
    assert runs[0].command == ("deepex.study.transfer", "--comm", "mpi", "--seconds", "0.3", "--sizes", "8,64")
    assert all(run.ranks == 4 and run.estimate_seconds for run in runs)


def test_transfer_takes_the_communicators_that_there_can_be() -> None:
    subject = replace(open_subject(Request(recipe="fashion")), gpus=2)
    comms = {ranks: [variant.varied["comm"] for variant in Transfer(ranks=ranks).variants(subject)] for ranks in (1, 2, 4)}
    assert comms == {1: ["mpi"], 2: ["mpi", "gloo", "nccl"], 4: ["mpi", "gloo"]}


def test_every_placement_format_and_directory_with_its_copy_made_before() -> None:
    kind = Storage(directories=("/dev/shm",), placements=("host", "stream"), formats=("packed", "hdf5"))
    runs = plan(kind, repeats=1)
    assert [tuple(run.varied.values()) for run in runs] == [
        ("host", "packed", "/dev/shm"),
        ("host", "hdf5", "/dev/shm"),
        ("stream", "packed", "/dev/shm"),
        ("stream", "hdf5", "/dev/shm"),
    ]
    assert runs[1].before == ("deepex.study.storage", "sample:fashion", "/dev/shm", "hdf5")
    assert settings(runs[1])["data"].startswith("/dev/shm/deepex-storage-")
    assert settings(runs[1])["data"].endswith("plain.h5")
    assert settings(runs[1])["data_options.layout"] == "NHWC"
    assert "data_options.layout" not in settings(runs[0])
    with pytest.raises(ConfigError, match="--directories is empty"):
        Storage(directories=())


def test_frameworks_that_are_there_are_compared_and_others_named() -> None:
    kind = Frameworks(ranks=2)
    runs = plan(kind, repeats=1)
    there = [name for name, found in available().items() if found.version]
    assert [run.varied["framework"] for run in runs] == ["deepex", "deepex-gradients", *there]
    assert "pytorch" in there
    assert runs[2].command[:3] == ("deepex.study.frameworks", "pytorch", "fashion")
    missing = [name for name in available() if name not in there]
    notes = kind.notes(open_subject(Request(recipe="fashion")))
    assert [note.split()[2] for note in notes if note.startswith("not installed")] == missing
    with pytest.raises(UnknownName, match="unknown framework 'torch'"):
        Frameworks(names=("torch",))
