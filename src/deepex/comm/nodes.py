"""What the ranks run on: every node described once, with the ranks that it has.

machines = describe_nodes(comm, Path("runs"), os.environ)      # machine.json of a run
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepex.comm.base import Communicator
from deepex.machine import describe


def describe_nodes(comm: Communicator, directory: Path, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Describe each node and the file system of `directory` there; `ranks` are those on it. Collective."""
    place = comm.place
    told = comm.gather([place.node, describe(directory, environ) if place.local_rank == 0 else None])
    return [
        machine | {"ranks": [rank for rank, (other, _) in enumerate(told) if other == node]} for node, machine in told if machine
    ]
