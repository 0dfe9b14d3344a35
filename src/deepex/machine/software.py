"""Versions, source commit, thread settings and the batch job.

>>> describe_versions()["torch"]
'2.13.0+cu130'
>>> describe_commit()                      # of the source tree; None for an installed package
>>> describe_job(os.environ)
{'scheduler': 'slurm', 'id': '123456'}
"""

import platform
import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from deepex.machine.reading import attempt, read_text

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)
_JOB_VARIABLES: Final = {
    "slurm": "SLURM_JOB_ID",
    "pbs": "PBS_JOBID",
    "lsf": "LSB_JOBID",
    "flux": "FLUX_JOB_ID",
    "cobalt": "COBALT_JOBID",
    "oar": "OAR_JOB_ID",
    "sge": "JOB_ID",
}


def describe_system() -> dict[str, Any]:
    """Describe the operating system."""
    return {
        "name": platform.system(),
        "distribution": attempt(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }


def describe_versions() -> dict[str, str | None]:
    """List the versions that decide speed and arithmetic. CUDA, cuDNN and NCCL are those that torch was built with."""
    installed = {name: attempt(partial(metadata.version, name)) for name in ("deepex", "numpy", "mpi4py", "triton")}
    return {"python": platform.python_version(), **installed, **_torch_versions(), "mpi": _loaded_mpi()}


def describe_threads(environ: Mapping[str, str]) -> dict[str, Any]:
    """Describe how many threads torch uses, and the variables that led to it."""
    import torch

    return {
        "num_torch_threads": torch.get_num_threads(),
        "num_torch_interop_threads": torch.get_num_interop_threads(),
        "variables": {name: environ[name] for name in THREAD_VARIABLES if name in environ},
    }


def describe_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Find the batch job that this process belongs to."""
    found = ((scheduler, environ.get(name)) for scheduler, name in _JOB_VARIABLES.items())
    return next(({"scheduler": scheduler, "id": job} for scheduler, job in found if job), None)


def describe_commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """Read the commit of the source tree that `package` runs from.

    Only `TREE/src/deepex` counts as one: a package installed somewhere below another project must not report that
    project's commit. Git itself is not started: it may be missing on a compute node, and costs more than reading files.
    """
    git = package.parents[1] / ".git"
    if package.parent.name != "src" or not git.exists():
        return None
    pointer = read_text(git) if git.is_file() else None  # a second work tree has a file that names its directory
    if pointer:
        git = (git.parent / pointer.removeprefix("gitdir:").strip()).resolve()
    head = (read_text(git / "HEAD") or "").strip()
    if not head.startswith("ref:"):
        return head or None
    shared = (git / (read_text(git / "commondir") or ".").strip()).resolve()
    return _follow(head.removeprefix("ref:").strip(), git, shared)


def _follow(reference: str, git: Path, shared: Path) -> str | None:
    """Find the commit of a branch: in a file of its own, or among the packed ones."""
    for directory in (git, shared):
        text = read_text(directory / reference)
        if text:
            return text.strip()
    packed = (line.split() for line in (read_text(shared / "packed-refs") or "").splitlines())
    return next((part[0] for part in packed if len(part) == 2 and part[1] == reference), None)


def _torch_versions() -> dict[str, str | None]:
    torch: Any = attempt(lambda: __import__("torch"))
    if torch is None:
        return dict.fromkeys(("torch", "cuda", "cudnn", "nccl"))
    cudnn = attempt(torch.backends.cudnn.version)
    nccl = attempt(torch.cuda.nccl.version)
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def _loaded_mpi() -> str | None:
    """Return the MPI library's own words, if this process has loaded it; asking does not start it."""
    module: Any = sys.modules.get("mpi4py.MPI")
    version = attempt(lambda: str(module.Get_library_version())) if module else None
    return version.strip("\0 \n").splitlines()[0] if version else None
