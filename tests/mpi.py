"""Run a script of the tests on real MPI ranks."""

import os
import subprocess
import sys
from pathlib import Path

from deepex.comm.launch import launcher_prefix

ROOT = Path(__file__).parent.parent
HANGS = (
    400.0  # seconds after which a child is taken to hang: many times what any takes, as a shared machine may starve it for minutes
)

PATIENT = {"DEEPEX_START_SECONDS": "200"}  # as there too


def rank_environ(**extra: str) -> dict[str, str]:
    """The environment for ranks: one thread each, so that four of them fit on two cores; no variables of an outer job."""
    outer = ("PMI_", "OMPI_", "PMIX_", "SLURM_", "MPI_", "HYDRA", "MASTER_", "DEEPEX_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A rank of MPICH that waits sleeps a little between its looks, rather than take a core from the one that it waits for.
    return {**kept, "OMP_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "PYTHONPATH": path, **PATIENT, **extra}


def run_ranks(ranks: int, *command: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND…` on `ranks` ranks and give back what it printed."""
    prefix, extra = launcher_prefix(ranks)
    return subprocess.run(
        [*prefix, sys.executable, *command],
        cwd=cwd,
        env=rank_environ(**extra, **environ),
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


def run_deepex(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the `deepex` command as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "deepex", *arguments],
        cwd=cwd,
        env=rank_environ(**environ),
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


def own_lines(stderr: str) -> list[str]:
    """The lines in which `deepex` itself speaks. Open MPI ends its own messages with a zero byte, which may stand before one."""
    return [line for line in stderr.replace("\0", "").splitlines() if line.startswith("deepex:")]
