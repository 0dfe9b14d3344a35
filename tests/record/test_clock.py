from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.record import clock as module
from deepex.record.clock import BACKWARD, COMPUTE, FORWARD, INPUT, PHASES, SYNC, UPDATE, DeviceClock, HostClock, NoClock
from tests.full import examples

NOTHING = dict.fromkeys(PHASES, 0.0)


class Time:
    """Stands in for perf_counter: time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Device:
    """A device whose queue the test fills: work runs for so many seconds, events take the time at which they are reached."""

    def __init__(self) -> None:
        self.time = Time()
        self.events: list[Event] = []
        self.synchronised: list[Event] = []

    def make_event(self) -> "Event":
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    """As torch.cuda.Event: a time in milliseconds, refused before the device was waited for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reached: float | None = None
        self.num_records = 0

    def record(self) -> None:
        self.reached = self.device.time.now
        self.num_records += 1

    def synchronize(self) -> None:
        self.device.synchronised.append(self)

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.device.synchronised, "read before the device was waited for"
        assert self.reached is not None
        assert end_event.reached is not None
        return (end_event.reached - self.reached) * 1000.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(module, "perf_counter", fake)
    return fake


def test_the_phases_are_those_of_the_paper() -> None:
    assert PHASES == ("input", "forward", "backward", "update", "sync")
    assert [PHASES[phase] for phase in (INPUT, FORWARD, BACKWARD, UPDATE, SYNC)] == list(PHASES)
    assert PHASES[1:4] == COMPUTE


# On the host


def test_a_mark_takes_the_time_since_the_last(time: Time) -> None:
    clock = HostClock()
    time.passes(64.0)  # before start: nobody's
    clock.start()
    for phase, seconds in ((INPUT, 1.0), (FORWARD, 2.0), (BACKWARD, 4.0), (UPDATE, 8.0), (SYNC, 16.0), (FORWARD, 32.0)):
        time.passes(seconds)
        clock.mark(phase)
    assert clock.seconds() == {"input": 1.0, "forward": 34.0, "backward": 4.0, "update": 8.0, "sync": 16.0}


def test_start_begins_anew_without_forgetting(time: Time) -> None:
    clock = HostClock()
    clock.start()
    time.passes(1.0)
    clock.mark(FORWARD)
    time.passes(100.0)  # a validation between two parts of an epoch
    clock.start()
    time.passes(2.0)
    clock.mark(FORWARD)
    assert clock.seconds() == NOTHING | {"forward": 3.0}


def test_reset_forgets_and_reading_does_not(time: Time) -> None:
    clock = HostClock()
    clock.start()
    time.passes(1.0)
    clock.mark(SYNC)
    assert clock.seconds() == clock.seconds() == NOTHING | {"sync": 1.0}
    clock.reset()
    assert clock.seconds() == NOTHING


marks = st.lists(st.tuples(st.integers(0, len(PHASES) - 1), st.integers(0, 1000)), max_size=30)


@settings(max_examples=examples(12, 50))
@given(marks)
def test_the_phases_sum_to_what_perf_counter_says(steps: list[tuple[int, int]]) -> None:
    """Whole seconds, so that sums are exact: what was marked is all of the time between start and the last mark."""
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", time)
        clock = HostClock()
        clock.start()
        began = time()
        for phase, seconds in steps:
            time.passes(seconds)
            clock.mark(phase)
        assert sum(clock.seconds().values()) == time() - began
    assert clock.seconds() == {name: float(sum(s for p, s in steps if PHASES[p] == name)) for name in PHASES}


def test_a_readers_dictionary_is_its_own(time: Time) -> None:
    clock = HostClock()
    clock.seconds()["sync"] = 5.0
    assert clock.seconds() == NOTHING


def test_the_processors_time_goes_to_the_phase_that_took_it(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    cpu = Time()
    monkeypatch.setattr(module, "process_time", cpu)
    clock = HostClock()
    cpu.passes(64.0)  # before start: nobody's
    clock.start()
    for phase, seconds, busy in ((INPUT, 1.0, 0.0), (FORWARD, 2.0, 4.0), (INPUT, 1.0, 0.5)):
        time.passes(seconds)
        cpu.passes(busy)
        clock.mark(phase)
    assert clock.progress() == ((2.0, 2.0, 0.0, 0.0, 0.0), (0.5, 4.0, 0.0, 0.0, 0.0), time.now)


def test_progress_goes_on_when_the_clock_is_reset(time: Time) -> None:
    clock = HostClock()
    for _ in range(3):
        clock.reset()
        clock.start()
        time.passes(1.0)
        clock.mark(UPDATE)
        assert clock.seconds() == NOTHING | {"update": 1.0}
    assert clock.progress().seconds == (0.0, 0.0, 0.0, 3.0, 0.0)


@pytest.mark.parametrize("make", [NoClock, lambda: DeviceClock(Device().make_event)], ids=["no", "device"])
def test_who_does_not_know_the_phase_yet_tells_no_progress(make: Callable[[], module.PhaseClock]) -> None:
    assert make().progress() is None


# On a device


def test_device_phases_are_the_times_between_events() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    clock.start()
    for phase, seconds in ((INPUT, 1.0), (FORWARD, 2.0), (BACKWARD, 4.0), (UPDATE, 8.0), (SYNC, 16.0), (FORWARD, 32.0)):
        device.time.passes(seconds)
        clock.mark(phase)
    assert clock.seconds() == {"input": 1.0, "forward": 34.0, "backward": 4.0, "update": 8.0, "sync": 16.0}


def test_nobody_waits_for_the_device_before_the_end_of_the_epoch() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    clock.start()
    for phase in (INPUT, FORWARD, BACKWARD, UPDATE, SYNC) * 20:
        clock.mark(phase)
    assert device.synchronised == []
    clock.seconds()
    assert device.synchronised == [device.events[100]], "one wait, for the last event: the start and 100 marks came before"
    clock.seconds()
    assert len(device.synchronised) == 2


def test_device_start_begins_anew() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    clock.start()
    device.time.passes(1.0)
    clock.mark(FORWARD)
    device.time.passes(100.0)
    clock.start()
    device.time.passes(2.0)
    clock.mark(FORWARD)
    assert clock.seconds() == NOTHING | {"forward": 3.0}


def test_events_are_used_again_in_the_next_epoch() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    for seconds in (1.0, 2.0, 3.0):
        clock.reset()
        clock.start()
        device.time.passes(seconds)
        clock.mark(BACKWARD)
        assert clock.seconds() == NOTHING | {"backward": seconds}
    assert [event.num_records for event in device.events] == [3, 3]


def test_a_shorter_epoch_does_not_read_events_of_a_longer_one() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    for length in (5, 2):
        clock.reset()
        clock.start()
        for _ in range(length):
            device.time.passes(1.0)
            clock.mark(UPDATE)
        assert clock.seconds() == NOTHING | {"update": float(length)}
    assert device.synchronised == [device.events[5], device.events[2]]


def test_a_device_clock_that_marked_nothing_waits_for_nothing() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    assert clock.seconds() == NOTHING
    assert device.synchronised == []


def test_a_mark_before_the_first_start_takes_no_time_from_the_future() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    clock.mark(FORWARD)
    device.time.passes(1.0)
    clock.mark(UPDATE)
    assert clock.seconds() == NOTHING | {"update": 1.0}


@settings(max_examples=examples(12, 50))
@given(marks)
def test_device_and_host_agree(steps: list[tuple[int, int]]) -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", device.time)
        host, clock = HostClock(), DeviceClock(device.make_event)
        host.start()
        clock.start()
        for phase, seconds in steps:
            device.time.passes(seconds)
            host.mark(phase)
            clock.mark(phase)
    assert clock.seconds() == pytest.approx(host.seconds())


@pytest.mark.parametrize("make", [HostClock, NoClock, lambda: DeviceClock(Device().make_event)], ids=["host", "no", "device"])
def test_every_clock_names_every_phase(make: Callable[[], module.PhaseClock]) -> None:
    clock = make()
    clock.start()
    clock.mark(INPUT)
    assert list(clock.seconds()) == list(PHASES)


def test_no_clock_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "perf_counter", lambda: pytest.fail("NoClock asked for the time"))
    clock = NoClock()
    clock.start()
    clock.mark(FORWARD)
    assert clock.seconds() == NOTHING
    clock.reset()
    assert clock.seconds() == NOTHING
