"""Starting ranks on this machine: real jobs, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepex.comm import launch as module
from deepex.comm.joining import FOLDER
from deepex.comm.launch import launch, launcher_prefix
from deepex.errors import CommError, ConfigError
from tests.mpi import HANGS, rank_environ

RANK = """
import json, os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
lines = comm.gather([comm.rank, comm.size, os.environ["MARK"], sys.argv[1:]])
if comm.rank == 0:
    print(json.dumps(lines))
"""


def test_the_command_runs_on_ranks_of_one_job(capfd: pytest.CaptureFixture[str]) -> None:
    code = launch(2, [sys.executable, "-c", RANK, "--set", "target=error <= 0.1"], rank_environ(MARK="x y"))
    assert code == 0
    arguments = ["--set", "target=error <= 0.1"]
    assert json.loads(capfd.readouterr().out) == [[0, 2, "x y", arguments], [1, 2, "x y", arguments]]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_the_ranks_comes_back(code: int) -> None:
    assert launch(2, [sys.executable, "-c", f"raise SystemExit({code})"], rank_environ()) == code


def test_one_failing_rank_fails_the_job() -> None:
    """The other waits in a barrier that never comes; the launcher ends it."""
    program = "from mpi4py import MPI; MPI.COMM_WORLD.rank == 1 and MPI.COMM_WORLD.Abort(3); MPI.COMM_WORLD.Barrier()"
    assert launch(2, [sys.executable, "-c", program], rank_environ()) == 3


@pytest.mark.parametrize("ranks", [0, -2])
def test_fewer_than_one_rank_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--ranks is {ranks}; it must be at least 1"):
        launch(ranks, ["true"], {})


def test_the_handlers_of_the_caller_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    launch(1, ["true"], rank_environ())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_launcher_belongs_to_the_mpi_that_mpi4py_loads() -> None:
    prefix, _ = launcher_prefix(3)
    assert prefix[1:3] == ["-n", "3"]
    assert os.access(prefix[0], os.X_OK)


def test_without_a_launcher_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_mpiexec", lambda _library, _name: None)
    with pytest.raises(CommError, match=r"no launcher of .*MPI.* was found; install one with `pip install mpich`"):
        launch(2, ["true"], {})


def test_the_code_of_the_rank_that_reported_counts(tmp_path: Path) -> None:
    """Whatever code the launcher makes of the ranks that it killed, or that died, after one had reported."""
    script = """
import os, signal, sys
from deepex.comm.launch import leave_code
if sys.argv[1] == "reports":
    leave_code(2, os.environ)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "rank.py"
    path.write_text(script, encoding="utf-8")
    assert launch(2, [sys.executable, str(path), "reports"], rank_environ()) == 2
    assert launch(2, [sys.executable, str(path), "dies"], rank_environ()) not in (0, 1, 2)


def test_a_rank_that_is_killed_while_it_reports_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may have reported before, and the launcher reads what is there."""
    environ = {FOLDER: str(tmp_path)}
    module.leave_code(2, environ)

    def killed(path: Path, _text: str, encoding: str) -> None:
        path.open("w", encoding=encoding).close()
        raise OSError("killed")

    monkeypatch.setattr(Path, "write_text", killed)
    module.leave_code(3, environ)
    assert (tmp_path / "code").read_text() == "2"


# Signals

LAUNCHING = """
import json, os, sys
from deepex.comm.launch import launch
code = launch(2, [sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ)
print(json.dumps({"code": code}))
"""
# A rank that writes its checkpoint, which takes a while, when it is told to stop.
CHECKPOINTING = """
import os, signal, sys, time
from pathlib import Path
from deepex.comm.place import find_place
here, rank = Path(sys.argv[1]), find_place(os.environ).rank
def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(0.3)
    (here / f"stopped-{rank}").write_text(str(number))
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
(here / f"ready-{rank}").write_text("")
time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A launching process in a session of its own, as a shell gives it one, whose two ranks are ready."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, CHECKPOINTING, str(tmp_path)],
        env=rank_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2 or process.poll() is not None)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def stopped(path: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in path.glob("stopped-*")}


def test_a_termination_reaches_the_ranks_and_they_may_finish(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """As a batch system sends it, to the launching process."""
    job.terminate()
    output, _ = job.communicate(timeout=HANGS)
    assert stopped(tmp_path) == {"stopped-0": "15", "stopped-1": "15"}, output
    assert job.returncode == 0
    assert json.loads(output.splitlines()[-1]) == {"code": 0}


def test_ctrl_c_at_the_terminal_reaches_the_ranks_once_and_they_may_finish(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """A terminal signals the whole foreground group; mpiexec, signalled a second time, kills the ranks at once."""
    os.killpg(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=HANGS)
    assert stopped(tmp_path) == {"stopped-0": "2", "stopped-1": "2"}, output
    assert job.returncode == 0
    assert json.loads(output.splitlines()[-1]) == {"code": 0}
