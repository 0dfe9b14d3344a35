"""Train the toy problem in several ways on real ranks: a job for those of the pool."""

import json
import sys
from dataclasses import replace
from typing import Any

from deepex.comm import as_communicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.sync.config import SyncConfig
from tests.sync.toy import Problem, train

_PROBLEM = Problem(replicas=8, count=130)
_UNLUCKY = Problem(replicas=8, count=130, losses=frozenset({(2, 0, 1), (3, 0, 1), (7, 1, 0), (0, 1, 3)}))
WAYS = {
    "weights": (_PROBLEM, SyncConfig(period=2)),
    "nesterov": (_PROBLEM, SyncConfig(period=3, outer="nesterov", outer_rate=0.5, outer_momentum=0.5)),
    "muon": (_PROBLEM, SyncConfig(period=3, outer="muon", momentum="reset")),
    "some lost": (_UNLUCKY, SyncConfig(period=2, momentum="local")),
    "some lost, groups of 2": (_UNLUCKY, SyncConfig(strategy="hierarchical", period=1, group=2, between=2)),
    "elastic": (_PROBLEM, SyncConfig(strategy="elastic", period=2)),
    "streaming": (_PROBLEM, SyncConfig(strategy="streaming", period=1, parts=3, momentum="local")),
    "background": (_PROBLEM, SyncConfig(strategy="background", period=1, parts=1)),
    "background in parts": (_PROBLEM, SyncConfig(strategy="background", period=1, parts=3)),
    "groups of 2": (_PROBLEM, SyncConfig(strategy="hierarchical", period=1, group=2, between=2)),
    "groups of 4": (_PROBLEM, SyncConfig(strategy="hierarchical", period=1, group=4, between=2, momentum="local")),
    "bf16": (_PROBLEM, SyncConfig(period=2, wire="bf16")),
    "int8": (_PROBLEM, SyncConfig(period=2, wire="int8", momentum="local")),
}


def of_replicas(way: tuple[Problem, SyncConfig], replicas: int) -> tuple[Problem, SyncConfig]:
    """The same way with so many replicas, in as many groups; what was lost of others is not."""
    problem, config = way
    group = config.group and max(1, config.group * replicas // problem.replicas)
    losses = frozenset(loss for loss in problem.losses if loss[0] < replicas)
    return replace(problem, replicas=replicas, losses=losses), replace(config, group=group)


def train_ways(comm: Any, kind: str, replicas: int) -> dict[str, list[float]]:
    """The state that all ranks have agreed on, of each way; `kind` is that of the communicator: mpi or gloo."""
    mine = as_communicator(comm)
    used = mine if kind == "mpi" else DistributedCommunicator(kind, bootstrap=mine)
    states = {
        f"{way} {deterministic}": train(*of_replicas(WAYS[way], replicas), used, deterministic=deterministic)[0].tolist()
        for way in WAYS
        for deterministic in (False, True)
    }
    everywhere = used.gather(json.dumps(states))
    assert all(other == everywhere[0] for other in everywhere), "ranks do not agree"
    used.close()
    return states


if __name__ == "__main__":  # on more ranks than the pool has: `mpiexec -n 8 python -m tests.sync.ranks 8`
    from mpi4py import MPI

    states = train_ways(MPI.COMM_WORLD, "mpi", int(sys.argv[1]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(states))
