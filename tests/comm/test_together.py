"""What ranks do together contains no communication: one that fails in it would leave the others waiting there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.engine import learner
from deepex.recipes import run as home
from tests.comm.background_contract import Wrapping
from tests.mpi import run_ranks

MakeData = Callable[[int], Path]


class Watched(Wrapping):
    """Refuses to communicate within `together`."""

    within = False

    def _refuse(self) -> None:
        assert not Watched.within, "a collective within what ranks do together"

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self._refuse()
        super().sum(tensor, weight)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._refuse()
        super().broadcast(tensor, root)

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        self._refuse()
        return super().gather_rows(row)

    @override
    def barrier(self) -> None:
        self._refuse()
        super().barrier()


@pytest.mark.parametrize("strategy", ["weights", "elastic", "hierarchical", "background"])
def test_nothing_that_ranks_do_together_communicates(
    strategy: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that begins, and of one that goes on."""
    together = home.together

    def watched(comm: Any, work: Callable[[], Any]) -> Any:
        def inside() -> Any:
            Watched.within = True
            try:
                return work()
            finally:
                Watched.within = False

        return together(comm, inside)

    monkeypatch.setattr(home, "together", watched)
    monkeypatch.setattr(learner, "together", watched)
    keys = {"data": str(make_data(64)), "net": "tests.networks:normed", "batch": 8, "replicas": 2, "sync.strategy": strategy}
    for epochs in (1, 2):
        config = deepex.recipe("fashion", {**keys, "epochs": epochs})
        done = deepex.train(config, Watched(SoloCommunicator()), out=tmp_path / "run", resume=epochs == 2)
        assert len(done.epochs()) == epochs


FAILS = """
import socket
from deepex.comm import connect
from deepex.comm.together import AgreedError, together
from deepex.errors import DataError
comm = connect("mpi")
def fails(ranks):
    if comm.rank in ranks:
        raise DataError("no such file")
for ranks in [1], [0, 1]:
    try:
        together(comm, lambda: fails(ranks))
    except AgreedError as agreed:
        print(type(agreed.error).__name__, str(agreed).replace(socket.gethostname(), "HOST"), flush=True)
"""


def test_an_error_of_one_rank_is_that_of_all_with_its_name() -> None:
    done = run_ranks(2, "-c", FAILS)
    assert done.stdout.count("DataError rank 1 on HOST: no such file") == 2, done.stderr
    assert done.stdout.count("DataError no such file") == 2
