"""Jobs that cannot start end soon, with one line that names rank and host: launchers × communicators × moments."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepex.comm.launch import launcher_prefix
from deepex.record.run import hold, is_held
from tests.comm.faults import with_fault
from tests.full import examples
from tests.mpi import HANGS, ROOT, own_lines, rank_environ, run_ranks

TRAIN = ("train", "fashion", "--set", "epochs=1", "--set", "samples=64", "--set", "batch=8", "--set", "validate=none", "--quiet")
GLOO = ("--set", "comm=gloo")
SHORT = "5"  # seconds that the ranks wait for each other here
DEEPEX = (sys.executable, "-m", "deepex")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "deepex")
# What a scheduler does that sets two variables and starts the same command twice.
BY_HAND = """
for rank in 0 1; do RANK=$rank WORLD_SIZE=2 "$@" & processes="$processes $!"; done
for process in $processes; do wait $process || code=$?; done; exit $code
"""


def end_of(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    own = rank_environ(DEEPEX_START_SECONDS=SHORT, **environ)
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=HANGS, check=False)


def start(launcher: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start `deepex` on two ranks and wait for its end."""
    if launcher == "ours":
        return end_of([*DEEPEX, *words, "--ranks", "2"], **environ)
    if launcher == "torchrun":
        return end_of([*TORCHRUN, *words], **environ)
    if launcher == "environment":
        return end_of(["sh", "-c", BY_HAND, "sh", *DEEPEX, *words], **environ)
    prefix, extra = launcher_prefix(2)
    return end_of([*prefix, *DEEPEX, *words], **extra | environ)


def named(lines: list[str]) -> list[str]:
    """Those lines that name a rank and this host."""
    return [line for line in lines if re.search(rf"rank [01]( or 1)? on {re.escape(socket.gethostname())}\b", line)]


ENDED = "before the 2 ranks had found each other"
WAITED = "has waited 5 s for"
SILENT = "has not answered for"

slow = pytest.mark.slow
FAULTS = [
    ("ours", (), 1, "python", "exit 0", ENDED),
    pytest.param("ours", (), 1, "python", "sleep", "", marks=slow),
    pytest.param("ours", (), 1, "deepex.cli", "raise", ENDED, marks=slow),
    pytest.param("ours", (), 1, "mpi4py.MPI", "raise", "rank 1 on .*: no MPI library could be loaded: libmade_up", marks=slow),
    ("ours", (), 1, "torch", "raise", "rank 1 on .*: ImportError: libmade_up"),
    ("ours", (), 1, "torch", "exit 0", ENDED),
    pytest.param("ours", (), 1, "torch", "signal 11", ENDED, marks=slow),
    pytest.param("ours", (), 1, "torch", "sleep", f"rank 1 on .* {SILENT}", marks=slow),
    ("ours", GLOO, 1, "deepex.comm.distributed", "raise", "rank 1 on .*: cannot join the others: ImportError: libmade_up"),
    pytest.param("ours", GLOO, 0, "deepex.comm.distributed", "sleep", WAITED, marks=slow),
    pytest.param("ours", (), 1, "deepex.comm.mpi", "raise", "rank 1 on .*: cannot join the others: ImportError", marks=slow),
    pytest.param("mpiexec", (), 1, "python", "sleep", WAITED, marks=slow),
    pytest.param("torchrun", (), 1, "torch", "exit 0", WAITED, marks=slow),
]
# Other ways to end, and other ranks, at the same moments.
MORE_FAULTS = [
    pytest.param("mpiexec", (), 1, "torch", "raise", "rank 1 on .*: ImportError: libmade_up", marks=slow),
    pytest.param("torchrun", (), 1, "deepex.training.run", "raise", "rank 1 on .*: ImportError: libmade_up", marks=slow),
    pytest.param("ours", (), 1, "python", "exit 3", ENDED, marks=slow),
    pytest.param("ours", (), 1, "python", "signal 9", ENDED, marks=slow),
    pytest.param("ours", (), 1, "mpi4py.MPI", "exit 0", ENDED, marks=slow),
    pytest.param("ours", (), 0, "mpi4py.MPI", "signal 9", ENDED, marks=slow),
    pytest.param("ours", (), 1, "torch", "exit 3", ENDED, marks=slow),
    pytest.param("ours", (), 0, "torch", "sleep", f"rank 0 on .* {SILENT}", marks=slow),
    pytest.param("ours", GLOO, 1, "deepex.comm.distributed", "exit 0", ENDED, marks=slow),
    pytest.param("mpiexec", (), 1, "mpi4py.MPI", "raise", "rank 1 on .*: no MPI library could be loaded", marks=slow),
    pytest.param("mpiexec", (), 0, "torch", "sleep", f"rank 0 on .* {SILENT}", marks=slow),
    pytest.param("mpiexec", GLOO, 1, "deepex.comm.distributed", "sleep", WAITED, marks=slow),
]


@pytest.mark.parametrize(("launcher", "more", "rank", "moment", "how", "said"), [*FAULTS, *examples([], MORE_FAULTS)])
def test_a_rank_that_fails_at_the_start_ends_the_job(  # noqa: PLR0917 - the columns of the table
    launcher: str, more: tuple[str, ...], rank: int, moment: str, how: str, said: str, tmp_path: Path
) -> None:
    environ = with_fault(tmp_path, rank, moment, how)
    ended = start(launcher, *TRAIN, *more, "--out", str(tmp_path / "run"), **environ)
    assert ended.returncode in (1, 2), ended.stderr
    lines = own_lines(ended.stderr)
    assert named(lines), ended.stderr
    assert re.search(said, " ".join(lines)), ended.stderr
    assert not (tmp_path / "run").exists()


def test_an_interface_that_one_rank_lacks_ends_the_job(tmp_path: Path) -> None:
    """gloo refuses it there; the other rank waits for a connection."""
    lacks = 'test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" != 1 || export GLOO_SOCKET_IFNAME=nowhere0; exec "$@"'
    prefix, extra = launcher_prefix(2)
    words = [*prefix, "sh", "-c", lacks, "sh", *DEEPEX, *TRAIN, *GLOO, "--out", str(tmp_path / "run")]
    ended = end_of(words, **extra)
    assert ended.returncode == 1
    assert re.search(r"rank 1 on .*: cannot join the others: .*nowhere0", named(own_lines(ended.stderr))[0])


# RANK and WORLD_SIZE


@pytest.mark.slow
def test_two_variables_without_an_address_are_refused(tmp_path: Path) -> None:
    ended = start("environment", *TRAIN, "--out", str(tmp_path / "run"))
    assert ended.returncode == 1
    assert all("MASTER_ADDR and MASTER_PORT are not set; set both" in line for line in named(own_lines(ended.stderr)))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_variables_and_an_address_make_one_job(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    done = start("environment", *TRAIN, "--out", str(tmp_path / "run"), MASTER_ADDR="localhost", MASTER_PORT=port)
    assert done.returncode == 0, done.stderr
    assert '"ranks": 2' in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.slow
def test_an_address_at_which_nobody_answers_ends_the_job(tmp_path: Path) -> None:
    one = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
    ended = end_of([*DEEPEX, *TRAIN, "--out", str(tmp_path / "run")], **one)
    assert ended.returncode == 1
    assert re.search(rf"rank 1 on .* {WAITED} the communicator", named(own_lines(ended.stderr))[0])


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    own = rank_environ(DEEPEX_START_SECONDS="soon")
    command = [*DEEPEX, *TRAIN, "--ranks", "2", "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=HANGS, check=False)
    assert ended.returncode == 2
    assert own_lines(ended.stderr) == [
        "deepex: DEEPEX_START_SECONDS is 'soon'; it must be a number of seconds above 0, as 20: correct it, or unset it"
    ]


# A communicator that adds up wrongly

BROKEN = """
import sys
import torch
from deepex.comm import connect
from deepex.comm import {module} as home

right = home.{name}.sum
def wrong(self, tensor, weight=1.0):
    right(self, tensor, weight)
    if self.rank == 1 and tensor.numel() > {least}:
        tensor[-1] += 1
home.{name}.sum = wrong
connect("{kind}")
print("all joined")
"""


@pytest.mark.parametrize(
    ("kind", "module", "name", "least"),
    [
        ("mpi", "mpi", "MpiCommunicator", 0),
        ("mpi", "mpi", "MpiCommunicator", 1000),
        ("gloo", "distributed", "DistributedCommunicator", 0),
    ],
)
def test_a_wrong_sum_on_one_rank_is_an_error_and_never_a_wrong_weight(kind: str, module: str, name: str, least: int) -> None:
    """Of short messages, or of long ones alone: libraries sum them by different algorithms."""
    ended = run_ranks(2, "-c", BROKEN.format(kind=kind, module=module, name=name, least=least))
    assert ended.returncode == 1
    assert "all joined" not in ended.stdout
    said = r"rank 1 on .*: cannot join the others: a sum of \d+ known numbers over 2 ranks came out wrong"
    assert any(re.search(said, line) for line in own_lines(ended.stderr)), ended.stderr  # gloo's other rank loses the connection


# Ranks that leave in the middle

LEAVING = """
import os, sys
from deepex.comm import connect
comm = connect("mpi")
comm.barrier()
if comm.rank == 1:
    {leaves}
comm.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["os._exit(0)", *examples([], ["os._exit(3)", "os.kill(os.getpid(), 9)"])])
def test_a_rank_that_leaves_in_the_middle_fails_the_job_whatever_its_code(leaves: str, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING.replace("{leaves}", leaves))
    ended = end_of([sys.executable, "-m", "deepex.comm.on_ranks", "2", "leaving"], PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1, ended.stderr
    (line,) = own_lines(ended.stderr)
    assert re.search(r"rank (0 or )?1 on .* ended in the middle, and did not say why", line)


NO_DESCRIPTORS = """
import os
def pidfd_open(*_):
    raise OSError(38, "Function not implemented")
os.pidfd_open = pidfd_open
"""


@pytest.mark.slow
def test_a_system_without_descriptors_of_processes_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_DESCRIPTORS)
    done = start("ours", *TRAIN, "--out", str(tmp_path / "run"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not own_lines(done.stderr)


def test_a_job_that_is_refused_leaves_the_others_directory_alone(tmp_path: Path) -> None:
    """Another job holds it, and has not written its run yet."""
    with hold(tmp_path / "run"):
        ended = end_of([*DEEPEX, *TRAIN, "--out", str(tmp_path / "run")])
        assert ended.returncode == 2
        assert "is being written by process" in ended.stderr
        assert is_held(tmp_path / "run")


# What launched the ranks is killed


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["launcher", "parent"])
def test_ranks_end_when_their_launcher_is_killed(killed: str, tmp_path: Path) -> None:
    """Ours, or the process that started the ranks: a helper of mpiexec with MPICH, mpiexec itself with Open MPI."""
    command = [*DEEPEX, *TRAIN, "--set", "epochs=100000", "--ranks", "2", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, env=rank_environ()) as job:
        wait_for((tmp_path / "run" / "epochs.jsonl").is_file, job)
        ranks = running(str(tmp_path / "run"))
        os.kill(job.pid if killed == "launcher" else parent(max(ranks)), signal.SIGKILL)
        assert job.wait(HANGS) not in (0, 2)
    assert len(ranks) >= 4, "our launcher, mpiexec and two ranks"
    wait_for(lambda: not running(str(tmp_path / "run")))


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def running(word: str) -> list[int]:
    """The processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for(holds: object, job: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + HANGS
    while not holds():  # type: ignore[operator] # a function
        assert time.monotonic() < end
        assert job is None or job.poll() is None
        time.sleep(0.1)
