"""Bad input gets one clear message with the value, the rule and the remedy; exit code 2, or 1 for a failure; no traceback."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import deepex
from deepex.cli import main
from deepex.comm.solo import SoloCommunicator
from tests.full import examples, in_full
from tests.mpi import HANGS, own_lines, run_deepex, run_ranks

MakeData = Callable[[int], Path]

LONG = "long" * 80


def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run the command line in this process: the exit code, and what it said on standard error."""
    monkeypatch.setattr("sys.argv", ["deepex", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "fasion"], ["unknown recipe 'fasion'", "did you mean fashion"]),
        (["train"], ["RECIPE or FILE.toml, or --resume"]),
        (["train", "nowhere.toml"], ["nowhere.toml does not exist"]),
        (["train", "fashion", "--set", "epoch=3"], ["unknown key 'epoch'", "did you mean epochs"]),
        (["train", "fashion", "--set", "sync.priod=3"], ["unknown key 'sync.priod'", "sync.period"]),
        (["train", "fashion", "--set", "epochs"], ["KEY=VALUE"]),
        (["train", "fashion", "--set", "epochs=many"], ["'epochs' is 'many'", "must be int"]),
        (["train", "fashion", "--set", "epochs=0"], ["epochs is 0", "at least 1"]),
        (["train", "fashion", "--set", "sync.period=0"], ["sync.period is 0", "at least 1", "'epoch'"]),
        (["train", "fashion", "--set", "sync.period=often"], ["sync.period is 'often'"]),
        (
            ["train", "fashion", "--set", "sync.strategy=gradients", "--set", "sync.period=4"],
            ["every step", "leave the period out"],
        ),
        (["train", "fashion", "--set", "optim.momentum=1.5"], ["optim.momentum is 1.5", "below 1"]),
        (["train", "fashion", "--set", "sampling=-1"], ["sampling is -1.0", "0 for no sampling"]),
        (["train", "fashion", "--set", "precision=fp8"], ["'precision' is 'fp8'", "fp32, tf32, bf16"]),
        (["train", "fashion", "--set", "net=resnet19"], ["unknown network 'resnet19'", "resnet18"]),
        (["train", "fashion", "--set", "net=nowhere:nothing"], ["'nowhere' cannot be imported", "PYTHONPATH"]),
        (["train", "fashion", "--set", "net=tests.networks:nothing"], ["tests.networks has no function 'nothing'"]),
        (["train", "fashion", "--set", "net=os:getcwd"], ["os belongs to Python itself", "torch.nn.Module"]),
        (["train", "fashion", "--set", "net=alexnet"], ["28", "63"]),
        (["train", "fashion", "--set", "init=normal"], ["unknown initialiser 'normal'", "gaussian"]),
        (["train", "fashion", "--set", "data=nowhere"], ["there is no directory nowhere", "deepex data pack"]),
        (["train", "fashion", "--set", "data=sample:mnist"], ["unknown sample dataset 'mnist'", "fashion"]),
        (["train", "fashion", "--set", "target=0.1"], ["target is", "validation error <= 0.1"]),
        (["train", "fashion", "--set", "target=rmse<0.1"], ["classify measures loss and error"]),
        (["train", "fashion", "--set", "task=guess"], ["unknown task 'guess'"]),
        (["train", "fashion", "--set", "objective=classify"], ["'objective' is called 'task' now"]),
        (["train", "fashion", "--replicas", "400"], ["400 replicas with batch 32", "at most 187 replicas or batch 15"]),
        (["train", "fashion", "--set", "device=cuda"], ["torch sees no GPU", "device=cpu"]),
        (["train", "fashion", "--set", "comm=nccl"], ["NCCL needs GPUs"]),
        (["train", "--resume", "nowhere"], ["nowhere is not a run directory"]),
        (["train", "fashion", "--ranks", "0"], ["--ranks is 0", "at least 1"]),
        (["show", "nowhere"], ["nowhere is not a run directory"]),
        (["train", "fashion", "--set", "net_options.classes=3"], ["net_options has 'classes'", "those of the dataset"]),
        (["train", "fashion", "--set", "net_options.name=3"], ["has no option 'name'"]),
        (["train", "fashion", "--set", 'data="a\\u0000b"'], ["key 'data' is 'a\\x00b'", "zero byte"]),
        (["train", "fashion", "--set", f"data={LONG}"], ["cannot be used: File name too long; give another"]),
        (["train", f"{LONG}.toml"], ["cannot be used: File name too long"]),
        (["show", LONG], [f"the path '{LONG[:90]}", "cannot be used: File name too long"]),
        (["data", "pack", LONG, "out"], ["cannot be used: File name too long"]),
        (["train", "fashion", "--bogus"], ["--bogus", "--help"]),
        (["frobnicate"], ["frobnicate", "--help"]),
    ],
)
def test_mistakes(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if arguments[0] == "train" and "--resume" not in arguments:
        arguments = [*arguments, f"--out={tmp_path / 'run'}"]
    code, said = run_here(capsys, monkeypatch, *arguments)
    assert code == 2, said
    assert len(said.strip().splitlines()) == 1, said
    assert "Traceback" not in said
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists(), "nothing is written before everything is checked"


@pytest.mark.parametrize("bad", ["a\nb", "a\x1bb", "a\rb", "a\u2028b"])
@pytest.mark.parametrize(
    "command",
    [
        "train fashion --out BAD",
        "train --resume BAD",
        "report . --out BAD",
        "study strong fashion --script slurm --out BAD",
        "data pack images BAD",
        "data make pf BAD --images 20",
        "data make pf out --images 20 --keep-trajectories BAD",
        "data info packed --sheet BAD",
    ],
)
def test_no_output_has_a_name_that_would_end_a_line(
    command: str, bad: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = command.split()
    before = arguments[arguments.index("BAD") - 1]
    option = before if before.startswith("--") else "OUT"
    monkeypatch.chdir(tmp_path)
    code, said = run_here(capsys, monkeypatch, *(word.replace("BAD", bad) for word in arguments))
    assert code == 2, said
    assert said == f"deepex: {option} is {bad!a}; a path must not have control characters such as newlines: choose another\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["storage", "fashion", "--directories", "/dev/shm,/nowhere"], ["--directories has '/nowhere'", "make it first"]),
        (["storage", "fashion", "--directories", "file"], ["--directories has 'file', which is not a directory"]),
        (["strong", "fashion", "--script", "slrum"], ["unknown batch system 'slrum'", "did you mean slurm"]),
        (["strong", "fashion", "--script", "slurm", "--header", "nowhere"], ["--header is 'nowhere'", "give a text file"]),
        (["transfer", "fashion", "--comms", "mpi,mip"], ["--comm is 'mip'; there are auto"]),
        (
            ["sync", "fashion", "--periods", "8,8"],
            ["two runs would be named strategy-weights_period-8_repeat-1", "give each value once"],
        ),
    ],
)
def test_a_study_that_cannot_work_writes_nothing(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    code, said = run_here(capsys, monkeypatch, "study", *arguments, "--out", "study")
    assert code == 2, said
    assert len(said.splitlines()) == 1, said
    assert all(word in said for word in words), said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_is_not_overwritten(
    make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "fashion", f"--out={tmp_path}/run", f"--set=data={make_data(64)}", "--set=epochs=1", "-q"]
    assert run_here(capsys, monkeypatch, *arguments)[0] == 0
    code, said = run_here(capsys, monkeypatch, *arguments)
    assert code == 2
    assert "already holds a run" in said
    assert "--resume" in said


def test_a_dataset_whose_checksums_fail(
    make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(make_data(64), data)
    bad = data / "train-00000.npy"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 255
    bad.write_bytes(content)
    code, said = run_here(capsys, monkeypatch, "train", "fashion", f"--set=data={data}", f"--out={tmp_path / 'run'}")
    assert code == 2
    assert "train-00000.npy" in said
    assert "verify=false" in said


@pytest.mark.slow
def test_mistakes_on_ranks_are_said_once_by_one_rank(tmp_path: Path) -> None:
    """Both ranks find that replicas are no multiple of ranks; one speaks, all end with 2."""
    result = run_ranks(2, "-m", "deepex", "train", "fashion", "--replicas=5", f"--out={tmp_path / 'run'}")
    assert result.returncode == 2
    lines = own_lines(result.stderr)
    assert len(lines) == 1, result.stderr
    assert "5 replicas cannot live on 2 ranks" in lines[0]
    assert "--replicas 4 or 6" in lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "cause"),
    [("fail", "RuntimeError: the accelerator fell off the bus"), pytest.param("die", None, marks=in_full)],
)
def test_a_failing_rank_ends_the_job_at_once(trouble: str, cause: str | None, make_data: MakeData, tmp_path: Path) -> None:
    """Rank 1 of 2 or 3 raises in a step, or is killed; the others wait in a collective and must not wait forever."""
    settings = [
        f"--set={s}" for s in ("net=tests.networks:troubled", f"data={make_data(192)}", "epochs=2", "batch=8", "validate=none")
    ]
    troubles = {"TROUBLE": trouble, "TROUBLED_RANK": "1", "SLOW_DISK": "1"}  # the failure is not to be overwritten by what was slow
    result = run_deepex("train", "fashion", f"--ranks={examples(2, 3)}", f"--out={tmp_path / 'run'}", *settings, **troubles)
    assert result.returncode == 1, (result.returncode, result.stderr)
    lines = own_lines(result.stderr)
    assert len(lines) == 1, result.stderr
    if cause:
        assert re.fullmatch(rf"deepex: rank 1 on \S+ failed: {cause} \(.*networks\.py, line \d+, in forward\)", lines[0])
        assert "Traceback" not in result.stderr
        assert "the accelerator fell off the bus" in (tmp_path / "run" / "failure-rank1.txt").read_text()
        state = json.loads((tmp_path / "run" / "run.json").read_text())
        assert state["status"] == "failed"
        assert state["reason"].startswith(f"rank 1: {cause} (")
    else:
        assert re.search(r"rank .*1.* on \S+ ended in the middle, and did not say why", lines[0])
        assert lines[0].endswith("a run that had begun continues with --resume RUN")


@pytest.mark.parametrize("where", ["deepex.step.eager.EagerStep.backward", "deepex.training.run.save_weights"])
def test_an_unexpected_failure_is_recorded(
    where: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deepex.recipe("fashion", {"data": str(make_data(48)), "epochs": 1, "batch": 8, "validate": "none"})
    monkeypatch.setattr(where, divmod)  # which takes other arguments; no frame of ours or of a user's is its own
    with pytest.raises(TypeError):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert state["status"] == "failed"
    assert re.fullmatch(r"TypeError: divmod expected 2 arguments, got \d", state["reason"])


def test_an_unexpected_failure_is_ours_to_be_reported(
    make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepex.step.eager.EagerStep.backward", divmod)
    code, said = run_here(capsys, monkeypatch, "train", "fashion", f"--set=data={make_data(48)}", f"--out={tmp_path / 'run'}")
    assert code == 1
    assert re.search(r"deepex: unexpected TypeError: divmod expected 2 arguments, got \d; .*, please report it", said)


@pytest.mark.parametrize("verb", ["train", "doctor"])
def test_a_directory_that_is_gone_is_told(verb: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd '{gone}' && rmdir '{gone}' && exec '{sys.executable}' -P -m deepex {verb}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=HANGS, check=False)
    assert (done.returncode, own_lines(done.stderr)) == (
        2,
        ["deepex: the directory that this was started in is gone: cd to one that is there"],
    )


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("train", "show", "doctor", "data"):
        monkeypatch.setattr("sys.argv", ["deepex", verb, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert "Usage: deepex" in capsys.readouterr().out
