"""Which MPI library this is, whether it takes device pointers, and which mpiexec belongs to it.

    name, version = identify(MPI.Get_library_version())             # "Open MPI", "5.0.8"
    able, why = cuda_aware(MPI.Get_library_version(), os.environ)     # in a process where MPI runs

MPI is never started here; `mpi_probe` does that in a process of its own.
"""

import ctypes
import filecmp
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from deepex.machine.reading import attempt

# The order matters: Spectrum MPI calls itself Open MPI, and Cray's and Ohio's are MPICHs.
_LIBRARIES: Final = (
    ("Spectrum MPI", r"IBM Spectrum MPI.*?ident: ([\w.]+)"),
    ("Cray MPICH", r"(?i:CRAY MPICH) version ([\w.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library (\d[\d.]*(?: Update \d+)?)"),
    ("MVAPICH", r"MVAPICH(?:2|-Plus)?(?:-\w+)? Version\s*:\s*(\S+)"),
    ("MPICH", r"MPICH2? Version:\s*(\S+)"),
    ("Open MPI", r"Open MPI v([\w.]+)"),
    ("Fujitsu MPI", r"FUJITSU MPI Library ([\w.]+)"),
    ("HPE MPT", r"HPE H?MPT ([\w.]+)"),
)
_MPICH_LAUNCHERS: Final = ("mpiexec.hydra", "mpiexec.mpich")
_OPEN_MPI_LAUNCHERS: Final = ("mpiexec.openmpi", "prterun", "orterun", "ompirun_wrapper")
# How ranks of srun and the library find each other. Cray's, IBM's and others are set up by the site, and its default knows them.
_SRUN: Final = {"MPICH": "pmi2", "Intel MPI": "pmi2", "MVAPICH": "pmi2", "Open MPI": "pmix"}
_CUDA: Final = 0  # MPIX_GPU_SUPPORT_CUDA of mpi.h
_OFF: Final = ("", "0", "no", "off", "false", "disable")


def identify(library_version: str) -> tuple[str, str | None]:
    """Name and version of the library, from what MPI_Get_library_version says."""
    for name, pattern in _LIBRARIES:
        match = re.search(pattern, library_version, re.DOTALL)
        if match:
            return name, match[1].rstrip(".")
    return "unknown", None


def srun_mpi(name: str | None) -> str | None:
    """What `srun --mpi` must be for the library `name`; None: the site's default."""
    return _SRUN.get(name or "")


def cuda_aware(library_version: str, environ: Mapping[str, str]) -> tuple[bool | None, str]:
    """Whether the MPI that runs in this process takes pointers to CUDA memory, and why; None: it cannot be known."""
    name = identify(library_version)[0]
    if name == "Open MPI":
        return _ask_open_mpi()
    if name == "MPICH":
        return _ask_mpich(environ)
    if name == "MVAPICH":
        return _ask_mvapich(environ)
    switch = {"Cray MPICH": _cray, "Spectrum MPI": _spectrum, "Intel MPI": _intel}.get(name)
    if switch is None:
        return None, f"there is no known way to ask {name if name != 'unknown' else 'this MPI library'}"
    return switch(environ)


def library_path() -> Path | None:
    """Find the file of the MPI library that mpi4py loaded into this process."""
    library = _library()
    # The profiling name: the plain one may belong to a tool that was preloaded to trace MPI.
    function: Any = attempt(lambda: library.PMPI_Init if library else None)
    if function is None:
        return None
    found = _SymbolInfo()
    address = ctypes.cast(function, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) or not found.file:
        return None
    file: bytes = found.file
    return Path(os.fsdecode(file)).absolute()


def find_mpiexec(library: Path, name: str) -> Path | None:
    """Find the launcher installed with `library`. Two MPIs may share a directory, where the last one owns `mpiexec`."""
    own, other = (
        (_OPEN_MPI_LAUNCHERS, _MPICH_LAUNCHERS)
        if name in ("Open MPI", "Spectrum MPI", "Fujitsu MPI")
        else (_MPICH_LAUNCHERS, _OPEN_MPI_LAUNCHERS)
    )
    prefixes = [*list(library.parents)[1:6], *list(library.resolve().parents)[1:6]]
    # Resolved, because where /bin is a link to /usr/bin, Open MPI takes "/bin/mpiexec" for an installation in "/" and refuses.
    folders = dict.fromkeys((prefix / "bin").resolve() for prefix in prefixes)
    programs = (folder / program for folder in folders for program in ("mpiexec", "mpirun", *own))
    return next((path for path in programs if os.access(path, os.X_OK) and not _is_one_of(path, other)), None)


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library() -> ctypes.CDLL | None:
    """Return a handle to the symbols of mpi4py's MPI library; it loads nothing that is not loaded."""
    module: Any = sys.modules.get("mpi4py.MPI")
    return attempt(lambda: ctypes.CDLL(module.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))


def find_function(name: str) -> Any:
    """Find a function of mpi4py's MPI library; that of a tool that was preloaded to trace MPI comes first. May be None."""
    library = _library()
    return attempt(lambda: getattr(ctypes.CDLL(None), name)) or attempt(lambda: getattr(library, name) if library else None)


def _running(function: str) -> Any:
    """Find a function of the MPI library, only while MPI runs: MPICH ends a process that calls it before or after."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if not module or not attempt(lambda: module.Is_initialized() and not module.Is_finalized()):
        return None
    library = _library()
    return attempt(lambda: getattr(library, function))


def _ask_open_mpi() -> tuple[bool | None, str]:
    query = _running("MPIX_Query_cuda_support")
    if query is None:
        return None, "MPIX_Query_cuda_support is missing, or MPI does not run"
    able = bool(query())
    return able, f"MPIX_Query_cuda_support says {'yes' if able else 'no: it needs an Open MPI and UCX built with CUDA'}"


def _ask_mpich(environ: Mapping[str, str]) -> tuple[bool | None, str]:
    if environ.get("MPIR_CVAR_ENABLE_GPU", "1").lower() in _OFF:
        return False, "MPIR_CVAR_ENABLE_GPU switches it off: unset it"
    # Not MPIX_Query_cuda_support, which MPICH has too: that of 4.0 ends the process by an inverted assertion.
    query = _running("MPIX_GPU_query_support")
    if query is None:
        return None, "MPIX_GPU_query_support is missing (MPICH before 4.0), or MPI does not run"
    able = ctypes.c_int(0)
    if query(ctypes.c_int(_CUDA), ctypes.byref(able)) != 0:
        return None, "MPIX_GPU_query_support failed"
    return bool(able), f"MPIX_GPU_query_support says {'yes' if able else 'no: it needs an MPICH built with CUDA'}"


def _ask_mvapich(environ: Mapping[str, str]) -> tuple[bool | None, str]:
    names = ("MV2_USE_CUDA", "MVP_USE_CUDA", "MVP_ENABLE_GPU")
    if all(environ.get(name, "").lower() in _OFF for name in names):
        return False, f"none of {', '.join(names)} is 1: set MV2_USE_CUDA=1 (MVAPICH2), MVP_USE_CUDA=1 (later ones)"
    query = _running("MPIX_Query_cuda_support")
    if query is None:
        return None, "it is switched on, but MPIX_Query_cuda_support is missing, or MPI does not run"
    able = bool(query())
    return able, f"it is switched on, and was built {'with' if able else 'without'} CUDA"


def _cray(environ: Mapping[str, str]) -> tuple[bool | None, str]:
    if environ.get("MPICH_GPU_SUPPORT_ENABLED", "").lower() in _OFF:
        return False, "MPICH_GPU_SUPPORT_ENABLED is not 1: set it, and link or preload libmpi_gtl_cuda"
    # MPI_Init ends the process where the variable is set and the transport library is not linked: whoever runs has it.
    return True, "MPICH_GPU_SUPPORT_ENABLED is 1"


def _spectrum(environ: Mapping[str, str]) -> tuple[bool | None, str]:
    if environ.get("OMPI_MCA_pml_pami_enable_cuda") == "1":
        return True, "started with -gpu"
    return False, 'not started with -gpu: use jsrun --smpiargs="-gpu" or mpirun -gpu'


def _intel(environ: Mapping[str, str]) -> tuple[bool | None, str]:
    on = environ.get("I_MPI_OFFLOAD", "").lower() not in _OFF
    if on and environ.get("I_MPI_OFFLOAD_MODE", "").lower() == "cuda":
        return True, "I_MPI_OFFLOAD is on with I_MPI_OFFLOAD_MODE=cuda"
    return False, "not asked for: set I_MPI_OFFLOAD=1 and I_MPI_OFFLOAD_MODE=cuda where this version knows it"


def _is_one_of(program: Path, names: tuple[str, ...]) -> bool:
    """Whether `program` is a link to, or a copy of, a program of another name beside it."""
    return any(attempt(partial(filecmp.cmp, program, program.with_name(name), shallow=False)) for name in names)
