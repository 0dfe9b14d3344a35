"""What a rank does before PyTorch is loaded: load the MPI library.

    load_mpi()
    import torch

Some sites ask for this order (OLCF's guide to mpi4py with PyTorch): MPI and PyTorch bring libraries of the same names, such as
hwloc or a CUDA runtime, and a process has the one that came first. MPI is not started by it.
"""

import os
from collections.abc import Mapping
from contextlib import suppress

from deepex.comm.library import import_mpi
from deepex.comm.place import find_place
from deepex.comm.start import WITHOUT_MPI
from deepex.errors import CommError


def load_mpi(environ: Mapping[str, str] | None = None) -> None:
    """Load MPI if a launcher of MPI ranks started this process; who connects later is told what went wrong."""
    with suppress(CommError):
        place = find_place(os.environ if environ is None else environ)
        if place.size > 1 and place.launcher not in WITHOUT_MPI:
            import_mpi()
