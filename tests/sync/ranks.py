"""Train the toy problem in several ways on real ranks: `mpiexec -n 4 python -m tests.sync.ranks mpi:4 gloo:4 mpi:2`.

Prints, for each communicator, the state of each way that all ranks have agreed on.
"""

import json
import sys
import time

from deepex.comm import connect
from deepex.comm.mpi import MpiCommunicator
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


def main(words: list[str]) -> None:
    world = connect("mpi")
    assert isinstance(world, MpiCommunicator)
    for word in words:
        kind, _, size = word.partition(":")
        part = world.split(int(world.rank >= int(size)))
        if world.rank < int(size):
            comm = connect("gloo") if kind == "gloo" else part
            states = {
                f"{way} {deterministic}": train(*WAYS[way], comm, deterministic=deterministic)[0].tolist()
                for way in WAYS
                for deterministic in (False, True)
            }
            everywhere = comm.gather(json.dumps(states))
            assert all(other == everywhere[0] for other in everywhere), "ranks do not agree"
            if comm.rank == 0:
                print(json.dumps({"where": word, "states": states}), flush=True)
        done = world._comm.Ibarrier()
        while not done.Test():
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
