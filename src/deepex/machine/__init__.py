"""What machine this is: hardware, software, limits, file systems, the MPI library.

>>> record = describe(Path("runs/first"), environ=os.environ)     # goes to machine.json of a run; starts nothing
>>> mpi = probe_mpi()                                             # starts MPI, in a process of its own
>>> mpi["version"], mpi["thread_level"], mpi["cuda_aware"]
('5.0.2', 'MULTIPLE', False)
"""

from deepex.machine.description import describe
from deepex.machine.mpi import cuda_aware
from deepex.machine.mpi_probe import probe_mpi, probe_world

__all__ = ["cuda_aware", "describe", "probe_mpi", "probe_world"]
