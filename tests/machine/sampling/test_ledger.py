"""What an interval used goes to the phases that passed in it, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.machine.sampling.ledger import EPOCH, OTHER, Ledger
from deepex.record.clock import BACKWARD, FORWARD, INPUT, PHASES, Progress

ZERO = (0.0,) * len(PHASES)


class Phases:
    """A clock whose time passes when the test says so."""

    def __init__(self) -> None:
        self.now, self._marked = 50.0, 50.0
        self._seconds, self._cpu_seconds = [0.0] * len(PHASES), [0.0] * len(PHASES)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def mark(self, phase: int, cpu_seconds: float = 0.0) -> None:
        self._seconds[phase] += self.now - self._marked
        self._cpu_seconds[phase] += cpu_seconds
        self._marked = self.now

    def start(self) -> None:
        self._marked = self.now

    def progress(self) -> Progress:
        return Progress(tuple(self._seconds), tuple(self._cpu_seconds), self._marked)


def begun(**counters: float) -> tuple[Phases, Ledger]:
    phases, ledger = Phases(), Ledger()
    ledger.begin(phases.now, counters, phases.progress())
    return phases, ledger


def test_an_interval_is_dealt_out_by_the_seconds_of_its_phases() -> None:
    phases, ledger = begun(read_bytes=1000.0)
    phases.passes(1.0)
    phases.mark(INPUT)
    phases.passes(3.0)
    phases.mark(FORWARD)
    ledger.add(phases.now, {"read_bytes": 1400.0}, phases.progress())
    used = ledger.take(phases.now, phases.progress()).amounts["read_bytes"]
    assert used == dict.fromkeys((*PHASES, OTHER), 0.0) | {"input": 100.0, "forward": 300.0}


def test_what_a_phase_uses_before_its_end_waits_for_its_name() -> None:
    """A phase of three intervals, and only in the last it is known which one it was."""
    phases, ledger = begun(read_bytes=0.0)
    for read in (10.0, 30.0):
        phases.passes(1.0)
        ledger.add(phases.now, {"read_bytes": read}, phases.progress())
    phases.passes(1.0)
    phases.mark(BACKWARD)
    ledger.add(phases.now, {"read_bytes": 60.0}, phases.progress())
    assert ledger.take(phases.now, phases.progress()).amounts["read_bytes"]["backward"] == pytest.approx(60.0)


def test_what_is_outside_the_phases_is_other() -> None:
    phases, ledger = begun(written_bytes=0.0)
    phases.passes(1.0)
    phases.mark(FORWARD)
    ledger.add(phases.now, {"written_bytes": 0.0}, phases.progress())
    ledger.settle(phases.now, phases.progress())
    phases.passes(2.0)  # a checkpoint
    ledger.add(phases.now, {"written_bytes": 500.0}, phases.progress())
    ledger.settle(phases.now, phases.progress())
    phases.start()
    phases.passes(1.0)
    phases.mark(FORWARD)
    ledger.add(phases.now, {"written_bytes": 500.0}, phases.progress())
    used = ledger.take(phases.now, phases.progress()).amounts["written_bytes"]
    assert (used["forward"], used["other"]) == (0.0, 500.0)


def test_what_was_settled_is_not_shared_again() -> None:
    phases, ledger = begun(read_bytes=0.0)
    phases.passes(8.0)  # outside the phases, with nothing read
    ledger.add(phases.now, {"read_bytes": 0.0}, phases.progress())
    ledger.settle(phases.now, phases.progress())
    phases.passes(1.0)
    ledger.add(phases.now, {"read_bytes": 10.0}, phases.progress())
    phases.start()
    phases.passes(1.0)
    phases.mark(INPUT)
    ledger.add(phases.now, {"read_bytes": 20.0}, phases.progress())
    used = ledger.take(phases.now, phases.progress()).amounts["read_bytes"]
    assert (used["input"], used["other"]) == (10.0, 10.0), "one second each since then"


def test_an_epoch_begins_with_nothing() -> None:
    phases, ledger = begun(read_bytes=0.0, cpu_seconds=0.0)
    for _ in range(2):
        phases.passes(1.0)
        phases.mark(INPUT, cpu_seconds=0.5)
        phases.passes(1.0)  # validation
        now = {"read_bytes": phases.now * 10, "memory_bytes": 5.0, "cpu_seconds": phases.now - 50}
        ledger.add(phases.now, now, phases.progress())
        used = ledger.take(phases.now, phases.progress())
        phases.start()
    assert used.amounts["read_bytes"] == pytest.approx(dict.fromkeys(PHASES, 0.0) | {"input": 10.0, "other": 10.0})
    assert used.amounts["cpu_seconds"] == pytest.approx(dict.fromkeys(PHASES, 0.0) | {"input": 0.5, "other": 1.5})
    assert ledger.take(phases.now, phases.progress()).peaks == {}


def test_the_processors_seconds_are_those_of_the_clock() -> None:
    """Not by share: here the phases take equal time, and one of them all of the processor."""
    phases, ledger = begun(cpu_seconds=100.0)
    phases.passes(1.0)
    phases.mark(INPUT, cpu_seconds=0.0)
    phases.passes(1.0)
    phases.mark(FORWARD, cpu_seconds=1.0)
    ledger.add(phases.now, {"cpu_seconds": 101.25}, phases.progress())
    used = ledger.take(phases.now, phases.progress()).amounts["cpu_seconds"]
    assert used == dict.fromkeys(PHASES, 0.0) | {"forward": 1.0, "other": 0.25}


def test_without_a_clock_of_the_host_all_is_under_epoch() -> None:
    ledger = Ledger()
    ledger.begin(0.0, {"gpu_joules": 5.0, "cpu_seconds": 1.0}, None)
    ledger.add(1.0, {"gpu_joules": 9.0, "cpu_seconds": 1.5, "gpu_memory_bytes": 8.0}, None)
    ledger.add(2.0, {"gpu_joules": 10.0, "cpu_seconds": 1.5, "gpu_memory_bytes": 6.0}, None)
    used = ledger.take(2.0, None)
    assert used.amounts == {"gpu_joules": {EPOCH: 5.0}, "cpu_seconds": {EPOCH: 0.5}}
    assert used.peaks == {"gpu_memory_bytes": 8.0}
    assert not used.by_phase


def test_a_counter_that_is_away_for_a_while_loses_nothing() -> None:
    phases, ledger = begun(network_bytes=10.0)
    ledger.add(phases.now, {}, phases.progress())
    ledger.add(phases.now, {"network_bytes": 30.0}, phases.progress())
    used = ledger.take(phases.now, phases.progress())
    assert sum(used.amounts["network_bytes"].values()) == 20.0
    assert list(used.amounts) == ["network_bytes"], "what was never read is absent"


def test_a_counter_that_begins_anew_takes_nothing_away() -> None:
    phases, ledger = begun(network_bytes=10.0)
    ledger.add(phases.now, {"network_bytes": 3.0}, phases.progress())
    assert sum(ledger.take(phases.now, phases.progress()).amounts["network_bytes"].values()) == 0.0


events = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), st.integers(0, len(PHASES) - 1)),
        st.tuples(st.sampled_from(("start", "settle", "take")), st.just(0)),
        st.tuples(st.just("sample"), st.integers(0, 1000)),
        st.tuples(st.just("time"), st.integers(0, 50)),
    ),
    max_size=60,
)


@given(events)
def test_what_the_phases_get_sums_up_to_the_whole(steps: list[tuple[str, int]]) -> None:
    phases, ledger = begun(read_bytes=0.0)
    read, total = 0.0, 0.0
    for what, number in [*steps, ("take", 0)]:
        if what == "time":
            phases.passes(number / 10)
        elif what == "mark":
            phases.mark(number)
        elif what == "start":
            phases.start()
        else:
            read += number if what == "sample" else 0
            ledger.add(phases.now, {"read_bytes": read}, phases.progress())
            if what == "settle":
                ledger.settle(phases.now, phases.progress())
            if what == "take":
                amounts = ledger.take(phases.now, phases.progress()).amounts["read_bytes"]
                assert all(amount >= -1e-9 for amount in amounts.values())
                total += sum(amounts.values())
    assert total == pytest.approx(read)
