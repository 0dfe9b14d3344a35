"""What ranks do together contains no communication: one that fails in it would leave the others waiting there."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepex
from deepex.comm import Call, WrappedCommunicator, as_communicator
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError, together
from deepex.errors import DataError
from deepex.training import build as build_module
from deepex.training import run as home
from tests.mpi import run_ranks
from tests.pool import RankPool

MakeData = Callable[[int], Path]


@pytest.mark.parametrize("strategy", ["weights", "elastic", "hierarchical", "background"])
def test_nothing_that_ranks_do_together_communicates(
    strategy: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that begins, and of one that goes on."""
    together, within = home.together, []

    def refuse(call: Call) -> None:
        assert not within, f"{call.what} within what ranks do together"

    def watched(comm: Any, work: Callable[[], Any]) -> Any:
        def inside() -> Any:
            within.append(work)
            try:
                return work()
            finally:
                within.clear()

        return together(comm, inside)

    monkeypatch.setattr(home, "together", watched)
    monkeypatch.setattr(build_module, "together", watched)
    keys = {"data": str(make_data(64)), "net": "tests.networks:normed", "batch": 8, "replicas": 2, "sync.strategy": strategy}
    for epochs in (1, 2):
        config = deepex.recipe("fashion", {**keys, "epochs": epochs})
        done = deepex.train(config, WrappedCommunicator(SoloCommunicator(), refuse), out=tmp_path / "run", resume=epochs == 2)
        assert len(done.epochs()) == epochs


def _fails(rank: int, ranks: list[int]) -> None:
    if rank in ranks:
        raise DataError("no such file")


def fail_together(comm: Any) -> list[str]:
    """What this rank is told where rank 1 alone fails, and where both do."""
    ours, said = as_communicator(comm), []
    for ranks in ([1], [0, 1]):
        try:
            together(ours, lambda ranks=ranks: _fails(ours.rank, ranks))
        except AgreedError as agreed:
            said.append(f"{type(agreed.error).__name__} {agreed}".replace(socket.gethostname(), "HOST"))
    ours.close()
    return said


@pytest.mark.ranks
def test_an_error_of_one_rank_is_that_of_all_with_its_name(ranks: RankPool) -> None:
    assert ranks.run(fail_together) == [["DataError rank 1 on HOST: no such file", "DataError no such file"]] * 2


EARLY = """
import os, socket
from deepex.comm.start import Start
from deepex.errors import ConfigError
start = Start.begin(os.environ)
def fails(messages):
    if messages[start.place.rank]:
        raise ConfigError(messages[start.place.rank])
for messages in (["one", "one"], ["one", "two"], ["", "two"]):
    try:
        start.agree(lambda: fails(messages), os.environ)
    except ConfigError as error:
        os.write(1, (str(error).replace(socket.gethostname(), "HOST") + "\\n").encode())
"""


@pytest.mark.ranks
def test_before_there_is_a_communicator_too() -> None:
    """Where all have the same error none is named; else the lowest that has one."""
    done = run_ranks(2, "-c", EARLY)
    said = sorted(line for line in done.stdout.splitlines() if line)
    assert said == ["one"] * 2 + ["rank 0 on HOST: one"] * 2 + ["rank 1 on HOST: two"] * 2, done.stderr
