"""Studies that really run: small trainings on real ranks, interrupted, failing, gone on with, and submitted."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

import pytest

from deepex.comm.launch import launcher_prefix
from deepex.errors import ConfigError, RunError, UnknownName
from deepex.machine import probe_mpi
from deepex.record import PlannedRun, RunDirectory, StudyDirectory
from deepex.record.run import is_held
from deepex.study.execute import execute, refuse_other
from deepex.study.script import SYSTEMS, Batch, JobEnvironment, write_scripts
from tests.full import examples, in_full
from tests.mpi import HANGS, rank_environ, run_deepex

MakeData = Callable[[int], Path]
ONE_RUN = ("variability", "fashion", "--ranks", "1", "--seeds", "1")
KIND, FIRST = examples((ONE_RUN, "seed-1_repeat-1"), (("strong", "fashion", "--ranks", "1,2"), "ranks-1_repeat-1"))


def planned(name: str, data: Path, *extra: str, ranks: int = 1) -> PlannedRun:
    keys = [f"data={data}", "epochs=2", "batch=16", "threads=1", "validate=none", *extra]
    words = [word for key in keys for word in ("--set", key)]
    return PlannedRun(name=name, varied={"ranks": ranks}, repeat=1, ranks=ranks, command=("deepex", "train", "fashion", *words))


def make_study(path: Path, *plan: PlannedRun) -> StudyDirectory:
    return StudyDirectory.create(path, plan=plan, machine=[], kind="strong", recipe="fashion", settings=[], options={}, targets=[])


@pytest.mark.slow
def test_a_study_runs_goes_on_and_says_what_failed(make_data: MakeData, tmp_path: Path) -> None:
    """Of three runs one fails, and is run again, alone, when the study goes on."""
    data = make_data(64)
    study = make_study(
        tmp_path / "study", planned("one", data), planned("bad", tmp_path / "nothing"), planned("two", data, ranks=2)
    )
    assert execute(study, rank_environ()) == "failed"
    assert [study.status(run) for run in study.plan] == ["finished", "failed", "finished"]
    assert "nothing" in study.reason(study.plan[1])
    assert study.state["reason"].startswith("1 of 3 runs failed, first bad: ")
    assert [len(run.epochs()[0].wall) for _planned, run in study.trained()] == [1, 2]
    assert not (study.run_path(study.plan[0]) / "checkpoints").exists(), "nobody goes on with what has finished"
    before = {path: path.stat().st_mtime_ns for path in study.path.rglob("epochs.jsonl")}
    shutil.copytree(data, tmp_path / "nothing")
    assert execute(study, rank_environ()) == "finished"
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what had finished is not run again"


def begin(tmp_path: Path, *keys: str) -> tuple[list[str], subprocess.Popen[str], RunDirectory]:
    """A study of runs of six epochs, whose first has done an epoch: its command, to go on with, its process, and that run."""
    command = [sys.executable, "-m", "deepex", "study", *KIND, "--repeats", "1", "--out", "study"]
    keys = (*keys, "batch=16", "validate=none", "target=loss <= 0")
    command += [word for key in keys for word in ("--set", key)] + ["--epochs", "6"]
    began = subprocess.Popen(command, cwd=tmp_path, env=rank_environ(), stdout=subprocess.PIPE, text=True)
    run = RunDirectory(tmp_path / "study/runs" / FIRST)
    while not (run.path / "epochs.jsonl").exists():
        assert began.poll() is None, "it ended before its first epoch did"
        sleep(0.01)
    return command, began, run


def go_on(command: list[str], tmp_path: Path) -> None:
    again = subprocess.run(command, cwd=tmp_path, env=rank_environ(), capture_output=True, text=True, timeout=HANGS, check=False)
    assert again.returncode == 0, again.stderr
    assert StudyDirectory.open(tmp_path / "study").state["status"] == "finished"


@pytest.mark.slow
def test_an_interrupted_study_goes_on_from_the_checkpoint(make_data: MakeData, tmp_path: Path) -> None:
    command, began, run = begin(tmp_path, f"data={make_data(512)}", "sync.period=1")
    began.send_signal(signal.SIGINT)
    said, _ = began.communicate(timeout=HANGS)
    assert (began.returncode, "stopped by SIGINT; the same command goes on" in said) == (0, True)
    assert run.state["status"] == "stopped"
    assert 1 <= len(run.epochs()) < 6
    go_on(command, tmp_path)
    assert run.state["resumed"] == [1]
    assert [epoch.epoch for epoch in run.epochs()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_with_the_run_that_it_left_at_work(make_data: MakeData, tmp_path: Path) -> None:
    command, began, run = begin(tmp_path, f"data={make_data(2048)}", "optim.rate=0.001")
    began.kill()
    began.communicate()
    assert is_held(run.path), "the run trains on: else this tests nothing"
    go_on(command, tmp_path)
    assert run.state["status"] == "finished"
    assert "resumed" not in run.state
    assert [epoch.epoch for epoch in run.epochs()] == [1, 2, 3, 4, 5, 6]
    assert not is_held(run.path)


@in_full
@pytest.mark.slow
def test_what_cannot_go_on_has_not_failed_when_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepex", "study", "transfer", "fashion", "--ranks", "2", "--comms", "mpi", "--repeats", "1"]
    began = subprocess.Popen(
        [*command, "--seconds", "30", "--out", "study"], cwd=tmp_path, env=rank_environ(), stdout=subprocess.PIPE
    )
    log = tmp_path / "study/runs/comm-mpi_repeat-1/log.txt"
    while not (log.exists() and log.stat().st_size):  # it has begun to measure
        assert began.poll() is None, "it ended before it measured"
        sleep(0.05)
    began.send_signal(signal.SIGINT)
    began.communicate(timeout=HANGS)
    study = StudyDirectory.open(tmp_path / "study")
    assert (began.returncode, study.state["status"]) == (0, "stopped")
    assert [study.status(planned) for planned in study.plan] == ["open"]


def test_two_do_not_run_one_study_at_once(make_data: MakeData, tmp_path: Path) -> None:
    from deepex.record.run import hold

    study = make_study(tmp_path, planned("one", make_data(64)))
    with hold(tmp_path), pytest.raises(RunError, match="is being written by"):
        execute(study, os.environ)


def test_another_study_is_refused_and_more_repeats_are_added(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(64)
    one, two = planned("one", data), planned("two", data)
    study = make_study(tmp_path, one)
    assert refuse_other(study, [one, two]) == [one, two]
    with pytest.raises(RunError, match=r"whose run one is .*not .*batch=8"):
        refuse_other(study, [planned("one", data, "batch=8")])
    with pytest.raises(RunError, match=r"holds another study \(strong\)"):
        refuse_other(study, [two])


@in_full
@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_writes_nothing(make_data: MakeData, tmp_path: Path) -> None:
    done = run_deepex(
        "study", "weak", "fashion", "--set", f"data={make_data(64)}", "--set", "batch=8", "--dry-run", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [table["varied"]["samples"] for table in told["plan"]] == [16, 32, 64, 64, 32, 16, 16, 32, 64]
    assert told["estimate_seconds"] == pytest.approx(sum(table["estimate_seconds"] for table in told["plan"]))
    assert told["estimate_seconds"] > 0
    assert list(tmp_path.iterdir()) == []


HOSTILE = 'it\'s a "b" $(touch c) `d` %j \\\\ #e'


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["plain", HOSTILE])
def test_job_scripts_are_shell_and_say_what_they_need(
    system: str, name: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    study = make_study(tmp_path / name / "study", planned("four", make_data(64), f"net=tests.networks:{name}", ranks=4))
    job = JobEnvironment(python=f"/opt/{name}/python", variables={"MPI4PY_LIBMPI": f"/{name}", "PYTHONPATH": name}, mpi="MPICH")
    submit = write_scripts(study, system, Batch(ranks_per_node=2, minutes=70, lines=("module load gcc",)), job)
    script = submit.with_name("four.sh")
    for path in (submit, script):
        subprocess.run(["bash", "-n", str(path)], check=True)
    text = script.read_text()
    wanted = {
        "slurm": ("--nodes=2", "--time=70", "srun -n 4"),
        "lsf": ("-nnodes 2", "-W 70", "jsrun -n 4"),
        "pbs": ("select=2:mpiprocs=2", "01:10:00"),
    }
    assert all(word in text for word in (*wanted[system], "module load gcc"))
    assert "four.sh" in submit.read_text()
    # What a shell makes of it: launchers and modules say with what they were called.
    says = "\n".join(f'{called}() {{ printf "%s\\n" "$@"; }}' for called in ("srun", "jsrun", "mpiexec", "module"))
    commands = text.replace(f"cd {shlex.quote(str(Path.cwd()))}", "cd /")
    done = subprocess.run(["bash", "-c", f"{says}\n{commands}"], capture_output=True, text=True, check=True, env={"PATH": "/bin"})
    words = done.stdout.splitlines()
    command = planned("four", make_data(64), f"net=tests.networks:{name}", ranks=4).command
    assert words[words.index("-m") + 1 :] == [*command, "--out", str(study.path / "runs/four")]
    assert f"/opt/{name}/python" in words
    assert not (tmp_path / name / "c").exists()


@pytest.mark.parametrize(
    ("mpi", "srun", "mpiexec"),
    [
        ("MPICH", "srun -n 4 --export=ALL --kill-on-bad-exit=1 --mpi=pmi2 ", "'/my mpi/mpiexec' -n 4 '/my env/python' -P -m"),
        (
            "Open MPI",
            "srun -n 4 --export=ALL --kill-on-bad-exit=1 --mpi=pmix ",
            "'/my mpi/mpiexec' -n 4 -x PATH -x LD_LIBRARY_PATH -x MPI4PY_LIBMPI '/my env/python' -P -m",
        ),
        ("Cray MPICH", "srun -n 4 --export=ALL --kill-on-bad-exit=1 '/my env/python'", "mpiexec -n 4 '/my env/python' -P -m"),
        (None, "srun -n 4 --export=ALL --kill-on-bad-exit=1 '/my env/python'", "mpiexec -n 4 '/my env/python' -P -m"),
    ],
)
def test_ranks_are_started_as_their_mpi_wants_it(
    mpi: str | None, srun: str, mpiexec: str, make_data: MakeData, tmp_path: Path
) -> None:
    study = make_study(tmp_path, planned("four", make_data(64), ranks=4))
    variables = {"LD_LIBRARY_PATH": "/my mpi", "MPI4PY_LIBMPI": "/my mpi/libmpi.so"}
    job = JobEnvironment(python="/my env/python", variables=variables, mpi=mpi, mpiexec="/my mpi/mpiexec" if mpi else None)
    text = {system: write_scripts(study, system, Batch(), job).with_name("four.sh").read_text() for system in ("slurm", "pbs")}
    assert f"\n  {srun}" in text["slurm"]
    assert f"\n  {mpiexec}" in text["pbs"]
    site = mpi in (None, "Cray MPICH")
    assert ("# srun without --mpi: the site's default is for" in text["slurm"]) is site
    assert ("# the site's mpiexec" in text["pbs"]) is site
    exports = [line for line in text["slurm"].splitlines() if line.startswith("export ")]
    assert exports == [
        "export PATH='/my env'\"${PATH:+:$PATH}\"",
        "export LD_LIBRARY_PATH='/my mpi'\"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\"",
        "export MPI4PY_LIBMPI='/my mpi/libmpi.so'",
    ]


@pytest.mark.slow
def test_a_job_script_runs_without_the_environment_of_its_shell(make_data: MakeData, tmp_path: Path) -> None:
    """The PBS script needs nothing but an mpiexec, so it can run here; in CI twice, because a job may be queued again."""
    study = make_study(tmp_path / "a study", planned("two", make_data(64), ranks=2))
    _, extra = launcher_prefix(2)
    script = write_scripts(study, "pbs", Batch(), JobEnvironment.here(probe_mpi(), rank_environ())).with_name("two.sh")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", **extra}
    for _ in range(examples(1, 2)):
        done = subprocess.run(["bash", str(script)], env=bare, cwd="/", capture_output=True, text=True, timeout=HANGS, check=False)
        assert done.returncode == 0, done.stderr
    ((run, trained),) = study.trained()
    assert (run.name, len(trained.epochs())) == ("two", 2)


def test_a_newline_reaches_no_job_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study(tmp_path / "a\n#SBATCH --wrap=evil")
    with pytest.raises(
        ConfigError, match=r"the directory of the scripts is '.*a\\n#SBATCH --wrap=evil/scripts'; a path must not have"
    ):
        write_scripts(study, "slurm", Batch(), JobEnvironment())
    monkeypatch.chdir(study.path)
    with pytest.raises(ConfigError, match="the current directory is"):
        write_scripts(make_study(tmp_path / "plain"), "slurm", Batch(), JobEnvironment())
    with pytest.raises(ConfigError, match="PYTHONPATH is"):
        JobEnvironment.here({"vendor": None, "mpiexec": None}, {"PYTHONPATH": "a\nb"})


def test_an_unknown_batch_system_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"lsf, pbs, slurm"):
        write_scripts(make_study(tmp_path), "slrm", Batch(), JobEnvironment())
