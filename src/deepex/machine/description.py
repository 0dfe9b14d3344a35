"""The record of a machine that every run carries as machine.json.

    describe(Path("runs/first"), environ=os.environ)["cpu"]["model"]

Names are stable and carry their units; what cannot be read is null. Nothing is started: no process, no MPI, no CUDA.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepex.machine.hardware import describe_cpu, describe_gpus, describe_memory
from deepex.machine.reading import attempt
from deepex.machine.software import (
    describe_commit,
    describe_job,
    describe_system,
    describe_threads,
    describe_versions,
)
from deepex.machine.storage import describe_file_system


def describe(directory: Path | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe this machine, and the file system of `directory` if one is given.

    Variables (visible GPUs, threads, batch job) are taken from `environ`; without it none are known.
    """
    variables = environ or {}
    return {
        "host": attempt(socket.gethostname),
        "system": attempt(describe_system),
        "cpu": attempt(describe_cpu),
        "memory": attempt(describe_memory),
        "gpus": attempt(lambda: describe_gpus(variables)) or [],
        "versions": attempt(describe_versions),
        "commit": attempt(describe_commit),
        "threads": attempt(lambda: describe_threads(variables)),
        "job": attempt(lambda: describe_job(variables)),
        "file_system": attempt(lambda: describe_file_system(directory)) if directory else None,
    }
