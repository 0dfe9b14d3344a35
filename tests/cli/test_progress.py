"""What a person sees: bars on a real terminal, lines in a log, and errors after the bar, on stderr."""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deepex.cli import main
from deepex.record import RunDirectory
from tests.full import examples
from tests.mpi import HANGS, ROOT, own_lines, rank_environ, run_deepex

MakeData = Callable[[int], Path]
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def arguments(data: Path, out: Path, *, ranks: int, net: str) -> list[str]:
    settings = (f"net={net}", f"data={data}", "epochs=3", "batch=8", "validate=none", "layout=contiguous")
    return ["train", "fashion", f"--ranks={ranks}", f"--out={out}", *(f"--set={setting}" for setting in settings)]


def run_on_terminal(*command: str, **environ: str) -> tuple[int, str, str]:
    """Run `deepex` with a terminal for its output, and a pipe for its errors: the exit code and what came from each."""
    master, slave = pty.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 4096):
                drawn.append(data)
        except OSError:  # how Linux says that the last writer closed it
            return

    variables = {**rank_environ(**environ), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "deepex", *command], cwd=ROOT, env=variables, stdout=slave, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(slave)
        reader = threading.Thread(target=read)
        reader.start()
        _, errors = process.communicate(timeout=HANGS)
        reader.join()
    os.close(master)
    return process.returncode, b"".join(drawn).decode(), errors


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", examples([2], [1, 2]))
def test_a_terminal_gets_bars_and_its_cursor_back_and_warnings_go_to_stderr(
    make_data: MakeData, tmp_path: Path, ranks: int
) -> None:
    code, drawn, errors = run_on_terminal(*arguments(make_data(48), tmp_path / "run", ranks=ranks, net="tests.networks:warning"))
    assert code == 0, errors
    assert "━" in drawn
    assert drawn.index(HIDDEN) < drawn.rindex(SHOWN)
    assert "epoch   3/3" in drawn
    assert "finished: 3 epochs done" in drawn
    assert "only for tests" in errors
    assert "only for tests" not in drawn


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", examples([2], [1, 2]))
def test_an_error_goes_to_stderr_and_the_terminal_gets_its_cursor_back(make_data: MakeData, tmp_path: Path, ranks: int) -> None:
    """A loss that is not a number: from the fourth pass on, which on two ranks, with 24 samples each, is in the second epoch."""
    command = arguments(make_data(48), tmp_path / "run", ranks=ranks, net="tests.networks:exploding")
    code, drawn, errors = run_on_terminal(*command, EXPLODE_AFTER="3")
    assert code == 1
    assert "is not a number" in errors
    assert "is not a number" not in drawn
    assert drawn.rindex(SHOWN) > drawn.rindex(HIDDEN)
    said = own_lines(errors)
    assert len(said) == 1, errors
    assert "lower optim.rate" in said[0]
    if ranks == 2:
        assert "the loss of epoch 2 is not a number on rank 0, 1" in said[0]
        assert "epoch000001-step000000.safetensors" in said[0]
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert state["status"] == "failed"


def test_a_log_gets_lines_and_no_control_characters(
    make_data: MakeData, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = arguments(make_data(48), tmp_path / "run", ranks=1, net="tests.networks:batch_normed")
    monkeypatch.setattr("sys.argv", ["deepex", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    check_log(capfd.readouterr().out)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_log_of_ranks_gets_lines_and_no_control_characters(make_data: MakeData, tmp_path: Path) -> None:
    result = run_deepex(*arguments(make_data(48), tmp_path / "run", ranks=2, net="tests.networks:batch_normed"))
    assert result.returncode == 0, result.stderr
    check_log(result.stdout)


def check_log(written: str) -> None:
    assert "epoch   3/3" in written
    assert "\x1b" not in written


@pytest.mark.slow
@pytest.mark.parametrize("stdout", examples(["full", "closed"], ["reader left", "full", "closed"]))
def test_a_run_goes_on_though_nobody_reads_along(stdout: str, make_data: MakeData, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "deepex", *arguments(make_data(64), out, ranks=1, net="lenet")]
    shell = {"reader left": '"$@" | true', "full": '"$@" > /dev/full', "closed": '"$@" >&-'}[stdout]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell, "-", *command],
        cwd=ROOT, env=rank_environ(), stderr=subprocess.PIPE, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert RunDirectory.open(out).outcome[0] == "finished"


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_are_started_though_our_own_output_is_closed(make_data: MakeData, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepex", *arguments(make_data(64), tmp_path / "run", ranks=2, net="lenet")]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "-", *command], cwd=ROOT, env=rank_environ(), timeout=HANGS, check=False)
    assert done.returncode == 0
    assert RunDirectory.open(tmp_path / "run").outcome[0] == "finished"


def test_what_cannot_be_printed_is_said_so() -> None:
    command = [sys.executable, "-m", "deepex", "train", "--list"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, env=rank_environ(), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "please report" not in done.stderr
