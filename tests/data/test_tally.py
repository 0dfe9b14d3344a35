"""What is read counts for whoever reads it, though several do so in one process."""

from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
from typing_extensions import override

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.feeds import read_counter
from deepex.record import RunDirectory
from deepex.training.config import RunConfig
from deepex.training.watch import Watcher

MakeData = Callable[[int], Path]


class Meeting(Watcher):
    """Waits, before each of the first epochs, until the other run has come as far."""

    def __init__(self, barrier: Barrier, epochs: int) -> None:
        self._barrier, self._epochs = barrier, epochs

    @override
    def epoch_began(self, epoch: int, samples: int) -> None:
        if epoch <= self._epochs:
            self._barrier.wait(timeout=60)


def train(data: Path, out: Path, *, placement: Any, watcher: Watcher | None = None) -> RunDirectory:
    config = RunConfig(net="tests.networks:plain", data=str(data), epochs=2, batch=8, placement=placement, layout="contiguous")
    return deepex.train(config, SoloCommunicator(), out=out, watcher=watcher)


def reads(run: RunDirectory) -> list[Any]:
    return [run.state["setup_usage"], *(epoch.usage[key] for epoch in run.epochs() for key in ("opens", "data_bytes"))]


def test_runs_in_threads_count_their_own_reads(make_data: MakeData, tmp_path: Path) -> None:
    data = (make_data(192), make_data(48))
    alone = [reads(train(path, tmp_path / f"alone{number}", placement="device")) for number, path in enumerate(data)]
    watcher = Meeting(Barrier(2), epochs=2)
    threads = [
        Thread(target=train, args=(path, tmp_path / f"both{number}"), kwargs={"placement": "device", "watcher": watcher})
        for number, path in enumerate(data)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone[0] != alone[1]
    assert [reads(RunDirectory.open(tmp_path / f"both{number}")) for number in (0, 1)] == alone


def test_a_run_takes_nothing_from_who_counts_around_it(make_data: MakeData, tmp_path: Path) -> None:
    with read_counter.counting():
        read_counter.opened(100)
        train(make_data(48), tmp_path / "run", placement="device")
        assert read_counter.take() == (1, 100)


@pytest.mark.parametrize("placement", ["device", "stream"])
def test_what_threads_of_a_run_read_is_in_its_record(make_data: MakeData, tmp_path: Path, placement: str) -> None:
    read_counter.take()
    run = train(make_data(192), tmp_path / "run", placement=placement)
    assert sum(sum(epoch.usage["data_bytes"]["input"]) for epoch in run.epochs()) >= 192 * 784
    assert read_counter.take() == (0, 0), "no thread counted elsewhere"


def test_a_thread_counts_where_its_maker_does() -> None:
    with read_counter.counting():
        reader = read_counter.thread("reads", read_counter.read, 7)
        reader.start()
        reader.join()
        assert (reader.name, reader.daemon, read_counter.take()) == ("reads", True, (0, 7))
