"""The thread: it samples by itself, it ends, and its errors are heard."""

import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

import pytest

from deepex.machine.sampling import Sampler, Series, open_sources
from deepex.machine.sampling.source import Reading, UsageSource
from deepex.record.clock import FORWARD, INPUT, HostClock, NoClock
from tests.machine.sampling.test_sources import burn


class Told(UsageSource):
    """Counts what the test tells it."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read, self.closed, self.reads = read, False, 0

    def read(self) -> Reading:
        self.reads += 1
        return self._read()

    def close(self) -> None:
        self.closed = True


def wait_for(condition: Callable[[], bool]) -> None:
    ends = perf_counter() + 60
    while not condition():
        assert perf_counter() < ends, "it never happened"
        sleep(0.005)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "deepex-sampler"]


def test_a_peak_between_two_takes_is_seen_by_the_thread() -> None:
    level = [1.0]
    source = Told(lambda: {"memory_bytes": level[0]})
    with Sampler(0.01, [source], NoClock().progress) as sampler:
        level[0] = 5.0
        before = source.reads
        wait_for(lambda: source.reads > before + 1)
        level[0] = 2.0
        assert sampler.take().peaks == {"memory_bytes": 5.0}
        level[0] = 1.0
        assert sampler.take().peaks["memory_bytes"] <= 2.0


def test_the_thread_ends_and_lets_go() -> None:
    source = Told(dict)
    with Sampler(0.01, [source], NoClock().progress):
        assert threads() == ["deepex-sampler"]
    assert threads() == []
    assert source.closed


def test_the_thread_ends_at_once_however_long_its_interval() -> None:
    with Sampler(3600.0, [Told(dict)], NoClock().progress) as sampler:
        pass
    assert sampler.num_samples == 0


def test_the_thread_ends_when_the_run_fails() -> None:
    with pytest.raises(KeyError), Sampler(0.01, [], NoClock().progress):
        raise KeyError
    assert threads() == []


def test_a_source_that_fails_is_absent() -> None:
    def fail() -> Reading:
        raise OSError

    with Sampler(0.01, [Told(fail), Told(lambda: {"memory_bytes": 3.0})], NoClock().progress) as sampler:
        used = sampler.take()
    assert used.amounts == {}
    assert used.peaks == {"memory_bytes": 3.0}


def test_an_error_in_the_thread_is_raised_where_it_is_heard() -> None:
    calls = [0]

    def progress() -> None:
        calls[0] += 1
        if threading.current_thread().name == "deepex-sampler":
            raise ZeroDivisionError

    with Sampler(0.01, [], progress) as sampler:
        wait_for(lambda: not threads())
        with pytest.raises(ZeroDivisionError):
            sampler.take()


def test_a_busy_phase_has_the_processor_and_an_idle_one_has_not() -> None:
    """With real counters: a phase that sleeps and one that computes, of some intervals each."""
    clock = HostClock()
    with Sampler(0.02, open_sources(first=True), clock.progress) as sampler:
        clock.start()
        for _ in range(3):
            sleep(0.05)
            clock.mark(INPUT)
            burn(0.1)
            clock.mark(FORWARD)
        used = sampler.take()
    cpu = used.amounts["cpu_seconds"]
    assert 0.29 < cpu["forward"] < 0.6
    assert cpu["input"] < 0.1
    assert used.by_phase
    assert used.peaks["memory_bytes"] > 1 << 20


def test_the_series_is_written_to_the_end(tmp_path: Path) -> None:
    sampler = Sampler(0.01, open_sources(first=True), NoClock().progress, Series(tmp_path / "resources.jsonl", 0.01))
    with sampler:
        wait_for(lambda: sampler.num_samples >= 3)
    text = (tmp_path / "resources.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") >= 3
    assert '"cpu_cores"' in text
