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
