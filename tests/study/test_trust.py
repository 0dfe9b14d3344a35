"""Studies that somebody else wrote: they run our own programs alone, and touch nothing outside their directory."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deepex.errors import ConfigError, RunError
from deepex.record import PlannedRun, RunDirectory, StudyDirectory
from deepex.record.files import write_json
from deepex.study.execute import execute, refuse_other
from deepex.study.script import Batch, JobEnvironment, write_scripts
from deepex.study.trust import check_commands, check_study
from tests.mpi import rank_environ

TRAIN = ("deepex", "train", "fashion", "--set", "epochs=1")
RUN = PlannedRun(name="one", varied={"ranks": 1}, repeat=1, ranks=1, command=TRAIN)


def write(path: Path, *plan: PlannedRun) -> StudyDirectory:
    """A study as somebody may write it: not through `create`, which checks."""
    path.mkdir(exist_ok=True)
    table = [asdict(planned) for planned in plan]
    write_json(path / "study.json", {"schema": 1, "kind": "strong", "recipe": "fashion", "plan": table})
    return StudyDirectory(path)


def use(study: StudyDirectory) -> list[Callable[[], object]]:
    """All that acts on a plan."""
    return [
        lambda: execute(study, rank_environ()),
        lambda: write_scripts(study, "slurm", Batch(), JobEnvironment()),
        lambda: refuse_other(study, [RUN]),
    ]


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a folder; what a link points to is not followed."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in paths
    }


@pytest.mark.parametrize("number", range(3))
def test_a_plan_deletes_nothing_outside_the_study(number: int, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "thesis.tex").write_text("years of work")
    study = write(tmp_path / "study", replace(RUN, name="../../victim"), RUN)
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"key 'plan\.0\.name' is '\.\./\.\./victim'; it must be a name for a directory"):
        use(study)[number]()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("before", [False, True])
def test_a_plan_runs_no_other_module(number: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    foreign = replace(RUN, before=("evil",)) if before else replace(RUN, command=("evil",))
    study = write(tmp_path / "study", foreign)
    with pytest.raises(RunError, match=r"study\.json: run one cannot be started: 'evil' is no program of a study; .* restore it"):
        use(study)[number]()
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize(
    "command",
    [
        TRAIN[:3],
        (*TRAIN, "--set", "target=validation error <= 0.2", "--set", " batch = 8"),
        ("deepex", "train", "mine/my run.toml"),
        ("deepex.study.frameworks", "pytorch", "fashion", "--set", "epochs=1"),
        ("deepex.study.transfer", "--comm", "mpi", "--seconds", "0.3"),
        ("deepex.study.transfer", "--comm", "gloo", "--seconds", "1e-05", "--sizes", "8,64"),
    ],
)
def test_what_studies_plan_may_run(command: tuple[str, ...]) -> None:
    check_commands([replace(RUN, command=command, before=("deepex.study.storage", "sample:fashion", "/dev/shm", "hdf5"))])


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (("os",), "'os' is no program of a study"),
        (("deepex",), "'deepex' is no program of a study"),
        (("deepex", "data", "pack"), "'deepex data' is no program of a study"),
        (("deepex.study.storage", "a", "b", "hdf5"), "'deepex.study.storage a' is no program"),
        (("deepex.study.transferred",), "is no program of a study"),
        (TRAIN[:2], "deepex train: it names no recipe"),
        (("deepex", "train", "--resume", "/home/else"), "'--resume' is no recipe"),
        (("deepex", "train", "a\nb"), r"'a\\nb' is no recipe"),
        ((*TRAIN, "--out"), "'--out' stands alone"),
        ((*TRAIN, "--out", "/home/else"), "'--out /home/else' is no --set KEY=VALUE"),
        ((*TRAIN, "--out=/home/else", "x=1"), "is no --set KEY=VALUE"),
        ((*TRAIN, "--set", "epochs"), "'--set epochs' is no --set KEY=VALUE"),
        ((*TRAIN, "--set", "--out=x"), "'--set --out=x' is no --set KEY=VALUE"),
        ((*TRAIN, "--set", "a=\0"), "is no --set KEY=VALUE"),
        (("deepex.study.frameworks", "torch", "fashion"), "it names no framework: pytorch"),
        (("deepex.study.frameworks", "pytorch"), "it names no recipe"),
        (("deepex.study.transfer",), "it takes --comm KIND --seconds NUMBER"),
        (("deepex.study.transfer", "--comm", "mpi", "--seconds"), "it takes --comm KIND"),
        (("deepex.study.transfer", "--comm", "mpi", "--seconds", "1", "--out", "/x"), "it takes --comm KIND"),
        (("deepex.study.transfer", "--comm", "mpi", "--seconds", "1", "--seconds", "1"), "it takes --comm KIND"),
        (("deepex.study.transfer", "--comm", "mip", "--seconds", "1"), "--comm is 'mip'; there are auto"),
        (("deepex.study.transfer", "--comm", "mpi", "--seconds", "long"), "--seconds is 'long', not a number"),
        (("deepex.study.transfer", "--comm", "mpi", "--seconds", "1", "--sizes", "8,x"), "--sizes is '8,x', not numbers"),
    ],
)
def test_nothing_else_may_run(command: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        check_commands([replace(RUN, command=command)])


@pytest.mark.parametrize(
    "words", [(), ("a", "b"), ("a", "--out", "hdf5"), ("", "b", "hdf5"), ("a", "b\n", "hdf5"), ("a", "b", "zip")]
)
def test_what_runs_before_is_a_copy(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"run one cannot be started: deepex\.study\.storage: .*(takes DATA|is no)"):
        check_commands([replace(RUN, before=("deepex.study.storage", *words))])


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "name", ["runs", "runs/one", "runs/one/log.txt", "scripts", ".lock", ".study.json.part", "runs/one/checkpoints"]
)
def test_no_link_leads_out(name: str, number: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    study = write(tmp_path / "study", RUN)
    link = study.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / "thesis.tex" if "." in name else victim)
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"is a link to .*victim.*, which is not in the study .*; remove the link"):
        use(study)[number]()
    assert contents(tmp_path) == before


def test_links_within_the_study_and_to_it_do_no_harm(tmp_path: Path) -> None:
    study = write(tmp_path / "study", RUN)
    (study.path / "runs/one").mkdir(parents=True)
    (study.path / "runs/first").symlink_to("one")
    (tmp_path / "scratch").symlink_to(study.path)
    check_study(StudyDirectory(tmp_path / "scratch"))


@pytest.mark.parametrize(
    ("foreign", "what"),
    [
        ({"command": (*TRAIN, "--set", "net=subprocess:run")}, "net=subprocess:run"),
        ({"command": (*TRAIN, "--set", "net_options.args=x")}, r"net_options\.args=x"),
        ({"command": ("deepex", "train", "theirs.toml")}, r"the recipe 'theirs\.toml'"),
        ({"command": ("deepex.study.frameworks", "jax", "theirs.toml")}, r"the recipe 'theirs\.toml'"),
        (
            {"before": ("deepex.study.storage", "sample:fashion", "/home/else", "packed")},
            "copies of 'sample:fashion' in '/home/else'",
        ),
    ],
)
def test_runs_beyond_the_command_bring_nothing_of_their_own(foreign: dict[str, Any], what: str, tmp_path: Path) -> None:
    """A name is enough to call a function: who goes on with a study runs what he named himself, and more of the same."""
    study = write(tmp_path / "study", RUN, replace(RUN, name="two", **foreign))
    with pytest.raises(RunError, match=rf"plans a run two with {what}, which this command does not name"):
        refuse_other(study, [RUN])
    own = replace(RUN, name="three", **foreign)
    assert refuse_other(study, [RUN, own])[-1] == own, "what the command names too may be there"
    more = write(tmp_path / "more", RUN, replace(RUN, name="two", ranks=2, command=(*TRAIN, "--set", "batch=8")))
    assert len(refuse_other(more, [RUN])) == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_run_goes_on_with_the_network_that_is_planned(own: bool, tmp_path: Path) -> None:
    """Its configuration is read from its directory, which came with the study."""
    mine = replace(RUN, command=(*TRAIN, "--set", "net=tests.networks:own", "--set", "net_options.features=4"))
    study = write(tmp_path / "study", mine if own else RUN)
    path = study.run_path(RUN)
    RunDirectory.create(path, {"net": "tests.networks:own", "net_options": {"features": 4}}, [], {})
    if own:
        check_study(study)
        return
    with pytest.raises(RunError, match=r"config\.toml has net 'tests\.networks:own' with .*, but the plan has 'lenet-caffe'"):
        check_study(study)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("tests.networks:own", "lenet"))
    check_study(study)


def test_a_framework_s_run_is_begun_and_not_resumed(tmp_path: Path) -> None:
    """Only our own training goes on from checkpoints; theirs would be trained by us, with what lies there."""
    from deepex.study.execute import _goes_on

    study = write(tmp_path / "study", RUN)
    run = RunDirectory.create(study.run_path(RUN), {"net": "lenet"}, [], {})
    (run.checkpoints / "1.json").write_text("{}")
    assert _goes_on(RUN, run.path)
    assert not _goes_on(replace(RUN, command=("deepex.study.frameworks", "jax", "fashion")), run.path)
