"""Where the time of an epoch goes: one clock per rank, five phases, read once per epoch.

    clock = HostClock()
    clock.start()
    batch = next(feed);  clock.mark(INPUT)
    loss = net(batch);   clock.mark(FORWARD)
    clock.seconds()      # {"input": 0.01, "forward": 0.2, ...}

`mark` attributes everything since the last mark to a phase. On a CPU it costs one `perf_counter` and one `process_time`; on an
accelerator it records an event and nobody waits for it: the events are read when the epoch is over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Final, NamedTuple, Protocol

from typing_extensions import override

PHASES: Final = ("input", "forward", "backward", "update", "sync")
INPUT, FORWARD, BACKWARD, UPDATE, SYNC = range(len(PHASES))
COMPUTE: Final = ("forward", "backward", "update")


class Event(Protocol):
    """What a device event must offer; `torch.Event("cuda", enable_timing=True)` does."""

    def record(self) -> None:
        """Put the event into the device's queue."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to `end_event`."""


class Progress(NamedTuple):
    """What a clock has given to each phase since it was made, whatever was reset; `marked`: when it last did (`perf_counter`).

    `cpu_seconds` are those of all threads of the process. They are exact for the thread that marks; of another thread that runs at
    that moment the kernel knows them up to its last tick only, some milliseconds ago.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    marked: float


class PhaseClock(ABC):
    """Seconds per phase since the last `reset`."""

    @abstractmethod
    def start(self) -> None:
        """Begin timing here: what passed since the last mark belongs to no phase."""

    @abstractmethod
    def mark(self, phase: int) -> None:
        """Attribute the time since the last mark or start to `phase`."""

    @abstractmethod
    def seconds(self) -> dict[str, float]:
        """Seconds per phase. May wait for the device: call it once per epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything measured so far."""

    def progress(self) -> Progress | None:
        """How far the phases have come, for another thread; None where only the device knows."""
        return None


class HostClock(PhaseClock):
    """Phases by `perf_counter`, for work that is done when the call returns.

    One thread marks. Another may ask for `progress`: it finds at worst a phase that has its seconds and a mark that is not yet set.
    """

    def __init__(self) -> None:
        self._seconds, self._cpu_seconds = [0.0] * len(PHASES), [0.0] * len(PHASES)
        self._forgotten = tuple(self._seconds)
        self._last, self._last_cpu = perf_counter(), process_time()

    @override
    def start(self) -> None:
        self._last, self._last_cpu = perf_counter(), process_time()

    @override
    def mark(self, phase: int) -> None:
        now, cpu = perf_counter(), process_time()
        self._seconds[phase] += now - self._last
        self._cpu_seconds[phase] += cpu - self._last_cpu
        self._last, self._last_cpu = now, cpu

    @override
    def seconds(self) -> dict[str, float]:
        return {name: now - then for name, now, then in zip(PHASES, self._seconds, self._forgotten, strict=True)}

    @override
    def reset(self) -> None:
        self._forgotten = tuple(self._seconds)

    @override
    def progress(self) -> Progress:
        return Progress(tuple(self._seconds), tuple(self._cpu_seconds), self._last)


class DeviceClock(PhaseClock):
    """Phases by device events. `make_event` makes one; events are kept and used again in the next epoch.

    A host-side wait between two marks (a blocking collective) counts too: both events sit in the device's queue in order, so the
    device's idle time while the host waits lies between them.
    """

    _START: Final = -1

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._events: list[Event] = []
        self._phases: list[int] = []

    @override
    def start(self) -> None:
        self.mark(self._START)

    @override
    def mark(self, phase: int) -> None:
        used = len(self._phases)
        if used == len(self._events):
            self._events.append(self._make_event())
        self._events[used].record()
        self._phases.append(phase)

    @override
    def seconds(self) -> dict[str, float]:
        total = [0.0] * len(PHASES)
        if self._phases:
            self._events[len(self._phases) - 1].synchronize()
        for index, phase in enumerate(self._phases):
            if phase != self._START and index > 0:
                total[phase] += self._events[index - 1].elapsed_time(self._events[index]) / 1000.0
        return dict(zip(PHASES, total, strict=True))

    @override
    def reset(self) -> None:
        self._phases.clear()


class NoClock(PhaseClock):
    """Measures nothing: the other side of the benchmark that shows what measuring costs."""

    @override
    def start(self) -> None:
        return

    @override
    def mark(self, phase: int) -> None:
        return

    @override
    def seconds(self) -> dict[str, float]:
        return dict.fromkeys(PHASES, 0.0)

    @override
    def reset(self) -> None:
        return
