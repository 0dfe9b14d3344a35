"""Start MPI in a process of its own and report what it is.

    facts = probe_mpi()
    facts["started"], facts["vendor"], facts["thread_level"]     # True, "MPICH", "MULTIPLE"
    facts["error"]                                                # a sentence where it did not start
    probe_world(os.environ)["size"]                               # on every rank of a launcher: how many ranks MPI sees

A broken MPI aborts the process that initialises it, and so does any MPI on the login nodes of some machines:
a caller must not do it itself.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from deepex.machine.mpi import cuda_aware, find_mpiexec, identify, library_path

_MARK: Final = "deepex-mpi-probe:"
_BEGIN: Final = "import os, sys; sys.path.insert(0, sys.argv[1]); from deepex.machine import mpi_probe; mpi_probe."
_PROGRAM: Final = f"{_BEGIN}report(os.environ)"
_WORLD_PROGRAM: Final = f"{_BEGIN}report_world()"
_CONNECTION: Final = "PMI_FD"  # the open file through which hydra and Slurm speak with a rank
# The child would answer to the launcher as the rank that started it, and break that rank's connection. Settings stay.
_LAUNCHER_VARIABLES: Final = re.compile(
    r"(PMI2?|HYDRA|HYDI|PALS|ALPS|SLURM|FLUX|JSM|PRTE|PRRTE)_|PMIX_(?!MCA_|PREFIX)|OMPI_COMM_|OMPI_UNIVERSE|OMPI_MCA_(orte|ess)|"
    r"MPI_LOCAL|MV2_COMM_WORLD"
)
_EMPTY: Final[dict[str, Any]] = {
    "started": False,
    "vendor": None,
    "version": None,
    "library_version": None,
    "standard": None,
    "library": None,
    "mpiexec": None,
    "thread_level": None,
    "cuda_aware": None,
    "cuda_aware_reason": "unknown: MPI did not start",
    "error": None,
}


def probe_mpi(timeout_seconds: float = 20) -> dict[str, Any]:
    """Report the MPI library that mpi4py loads here. All keys are always there; `error` is None if MPI started."""
    return _probe(_PROGRAM, timeout_seconds)


def probe_world(environ: Mapping[str, str], timeout_seconds: float = 60) -> dict[str, Any]:
    """Report how many ranks MPI sees where a launcher started this process: `size`, or `error`.

    Every rank of the job calls it, and none uses MPI itself: the process that is asked answers the launcher in its place.
    """
    connection = environ.get(_CONNECTION, "")
    facts = _probe(_WORLD_PROGRAM, timeout_seconds, (int(connection),) if connection.isdecimal() else ())
    return {"size": facts.get("size"), "error": facts["error"]}


def _probe(program: str, timeout_seconds: float, files: tuple[int, ...] = ()) -> dict[str, Any]:
    """Run a program that tells facts in a process of its own, which keeps these `files` open."""
    source = str(Path(__file__).parents[2])
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, with a program that is written above
            [sys.executable, "-P", "-c", program, source],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=files,
        )
    except OSError as error:
        return {**_EMPTY, "error": f"the probe could not be started: {error}"}
    with process:
        out, err, late = _collect(process, timeout_seconds)
    facts = {**_EMPTY, **_parse(out)}
    if not facts["started"] and facts["error"] is None:
        facts["error"] = late or _sentence(process.returncode, err)
    return facts


def report(environ: MutableMapping[str, str]) -> None:
    """Print the facts, those that need no running MPI first: the process may not survive the start."""
    for name in [name for name in environ if _LAUNCHER_VARIABLES.match(name)]:
        del environ[name]
    MPI = _load()  # noqa: N806 - as mpi4py names it
    if MPI is None:
        return
    words = MPI.Get_library_version().strip("\0 \n")
    vendor, version = identify(words)
    path = library_path()
    mpiexec = find_mpiexec(path, vendor) if path else None
    _say(
        {
            "vendor": vendor,
            "version": version,
            "library_version": words,
            "standard": ".".join(map(str, MPI.Get_version())),
        }
    )
    _say({"library": str(path) if path else None, "mpiexec": str(mpiexec) if mpiexec else None})
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    names = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    able, why = cuda_aware(words, environ)
    _say({"started": True, "thread_level": names.get(level), "cuda_aware": able, "cuda_aware_reason": why})
    MPI.Finalize()


def report_world() -> None:
    """Start MPI as the launcher's variables say, and print how many ranks it sees."""
    MPI = _load()  # noqa: N806 - as mpi4py names it
    if MPI is not None:
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        _say({"started": True, "size": MPI.COMM_WORLD.Get_size()})
        MPI.Finalize()


def _load() -> Any:
    """Load MPI without starting it; None, and the reason is told, where that fails."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _say({"error": " ".join(str(error).split())})
        return None
    return MPI


def _say(facts: dict[str, Any]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


def _collect(process: "subprocess.Popen[str]", timeout_seconds: float) -> tuple[str, str, str]:
    """Wait for the probe; if it is late, end it with the daemons that some MPIs start beside a single process."""
    try:
        return *process.communicate(timeout=timeout_seconds), ""
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return *process.communicate(), f"MPI did not start within {timeout_seconds:g} s"


def _parse(out: str) -> dict[str, Any]:
    """Join the facts; other lines are the MPI library's own chatter."""
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(_MARK):
            with contextlib.suppress(json.JSONDecodeError):
                facts |= json.loads(line.removeprefix(_MARK))
    return facts


def _sentence(code: int, err: str) -> str:
    """Say in one sentence why the probe ended: the first line that names an error, else the last one."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in err.splitlines() if line.strip(" -=*")]
    named = (line for line in lines if re.search(r"error|abort|fail|cannot|not found|unable", line, re.IGNORECASE))
    words = next(named, lines[-1] if lines else "it said nothing")
    return f"the process that started MPI {how}: {words[:400]}"
