"""Start ranks on this machine, through the mpiexec that belongs to the MPI library which mpi4py loads.

    code = launch(4, [sys.executable, "-m", "deepex", "train", "fashion"], os.environ)

The child's exit code comes back; SIGTERM and SIGINT are handed on, so that the ranks can write their checkpoint. A rank that tells
why the job fails leaves its exit code for us (`leave_code`): the launcher's own may be that of a rank which it killed afterwards.

Ranks of a command that `joins` are watched until they have found each other (joining.py). When we are killed, the kernel ends
mpiexec, and that its ranks.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from deepex.comm.joining import CODE, FOLDER, Joining, deadline_seconds
from deepex.errors import CommError, ConfigError
from deepex.machine.mpi import find_mpiexec, identify, library_path

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of prctl
_LOOK_SECONDS: Final = 0.05
_WATCH_SECONDS: Final = 1.0
_END_SECONDS: Final = 2.0  # for mpiexec to end its ranks
_LOST_SECONDS: Final = 10.0  # after the end of the last rank, until mpiexec must have noticed


def launch(ranks: int, command: Sequence[str], environ: Mapping[str, str], *, joins: bool = False) -> int:
    """Run `command` on `ranks` processes of this machine and return the job's exit code.

    The ranks of a command that `joins` find each other, or the job ends with a line that names one which did not come.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="deepex-") as name:
        folder = Path(name)
        code = _run(ranks, command, {**environ, FOLDER: name}, Joining(folder, ranks, deadline_seconds(environ)) if joins else None)
        failure = folder / CODE
        return int(failure.read_text(encoding="ascii")) if failure.exists() else code


def leave_code(code: int, environ: Mapping[str, str]) -> None:
    """Tell the process that launched this rank, if one of ours did, that the failure was reported and which exit code it has."""
    if FOLDER in environ:
        with suppress(OSError):
            path = Path(environ[FOLDER]) / CODE
            own = path.with_name(f"{path.name}-{os.getpid()}")
            own.write_text(str(code), encoding="ascii")
            own.replace(path)  # whole, whenever the launcher of the ranks kills this one


def _run(ranks: int, command: Sequence[str], environ: Mapping[str, str], joining: Joining | None) -> int:
    prefix, extra = launcher_prefix(ranks)
    # A group of its own: else Ctrl-C would reach the launcher twice, from the terminal and from us, and the second means "kill".
    process = subprocess.Popen(
        [*prefix, *command],
        env={**environ, **extra},
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_dying_with(os.getpid()),  # noqa: PLW1509 - no other thread runs in a process that launches
    )
    stopped: list[int] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        running = {*_ranks(process.pid, list(command)), *(joining.processes() if joining is not None else ())}
        for rank in running:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if not running:
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if joining is None:
            return process.wait()
        problem = _watch(process, list(command), joining)
        code = process.wait()
        if problem and not stopped:
            sys.stderr.write(f"deepex: {problem}\n")
            return 1
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(process: subprocess.Popen[bytes], command: list[str], joining: Joining) -> str:
    """Wait for the end of a job; what was wrong with it, if no rank has said so. One that cannot begin is ended."""
    lost = 0.0  # seconds since the last rank ended
    try:
        while process.poll() is None:
            begun, ended = joining.done(), joining.all_ended()
            joining.wait(_WATCH_SECONDS if begun and not ended else _LOOK_SECONDS)
            problem = None if begun else joining.problem(lambda: _ranks(process.pid, command))
            lost = lost + _LOOK_SECONDS if ended else 0.0
            if problem is not None or lost > _LOST_SECONDS:  # or mpiexec waits for nobody
                _end(process, _ranks(process.pid, command) + joining.processes())
                return problem or ""
        return joining.sentence(process.returncode)
    finally:
        joining.close()


def _end(process: subprocess.Popen[bytes], ranks: list[int]) -> None:
    """End mpiexec and its ranks, whatever they wait for."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.kill()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def _dying_with(parent: int) -> Callable[[], None]:
    """What makes a child get SIGTERM when the process `parent` dies, however it does: run in the child."""
    set_option = ctypes.CDLL(None).prctl  # found before the fork

    def arrange() -> None:
        set_option(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Get SIGTERM when the process that started this rank dies, if our launcher did: mpiexec misses the death of a helper."""
    if FOLDER in environ:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def _ranks(launcher: int, command: list[str]) -> list[int]:
    """The processes below `launcher` that run exactly `command`.

    A signal goes to them directly, because launchers differ in what they do with one: hydra hands SIGTERM on, mpirun of Open MPI
    kills its ranks with it.
    """
    parents, running = {}, []
    wanted = [os.fsencode(part) for part in command]
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it may have ended meanwhile
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().split(b"\0")[:-1] == wanted:
                running.append(pid)
    return [pid for pid in running if launcher in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def launcher_prefix(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the launch command and the variables it wants, for the MPI library that mpi4py loads here."""
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommError(f"no MPI library could be loaded: {error}; install one with `pip install mpich`") from error
    name = identify(MPI.Get_library_version())[0]
    library = library_path()
    mpiexec = find_mpiexec(library, name) if library is not None else None
    if mpiexec is None:
        raise CommError(f"no launcher of {name} was found; install one with `pip install mpich`, or load the site's MPI module")
    if name == "Open MPI":
        # Containers have root for their user and no ssh; Open MPI looks for one even if all ranks are here.
        extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm_rsh_agent": "sh"}
        return [str(mpiexec), "-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"], extra
    return [str(mpiexec), "-n", str(ranks)], {}
