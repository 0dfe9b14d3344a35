"""The thread that reads what a run uses.

    with Sampler(0.2, sources, clock.progress) as sampler:
        …
        used = sampler.take()

Two threads take samples: this one at every interval, and whoever calls `take` at the end of an epoch. Each does so under a lock
that nobody holds longer than a sample takes; the thread that trains meets it once an epoch.
"""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter, thread_time
from types import TracebackType
from typing import Self, final

from deepex.machine.reading import attempt
from deepex.machine.sampling.ledger import Ledger, Used
from deepex.machine.sampling.series import Series
from deepex.machine.sampling.source import Reading, UsageSource
from deepex.record.clock import Progress


@final
class Sampler:
    """Reads `sources`, which it closes in the end, between `start` and `close`; `own_seconds` is what its thread took of a core.

    An error in the thread is raised by the next `take`. `epoch` is for the series.
    """

    def __init__(
        self,
        interval_seconds: float,
        sources: Sequence[UsageSource],
        progress: Callable[[], Progress | None],
        series: Series | None = None,
    ) -> None:
        self._interval_seconds, self._sources, self._progress, self._series = interval_seconds, sources, progress, series
        self._ledger, self._lock, self._ended = Ledger(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepex-sampler", daemon=True)
        self._reading: Reading = {}
        self._last = 0.0
        self._error: BaseException | None = None
        self.epoch = 1
        self.own_seconds = 0.0
        self.num_samples = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Count from here."""
        if self._series is not None:
            self._series.open()
        self._last, self._reading = perf_counter(), self._read()
        self._ledger.begin(self._last, self._reading, self._progress())
        self._thread.start()

    def pause(self) -> None:
        """Take a sample. For the thread that marks the phases, when none is under way."""
        with self._lock:
            self._sample()
            self._ledger.settle(self._last, self._progress())

    def take(self) -> Used:
        """What was used since the last time; as for `pause`."""
        with self._lock:
            self._sample()
            used = self._ledger.take(self._last, self._progress())
        if self._error is not None:
            raise self._error
        return used

    def write(self, *, last: bool = False) -> None:
        """Write down the series so far."""
        if self._series is not None:
            with self._lock:
                self._series.write(last=last)

    def close(self) -> None:
        """End the thread, write down the rest of the series, and let go of the sources."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            self.write(last=True)
        for source in self._sources:
            attempt(source.close)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._interval_seconds):
                with self._lock:
                    self._sample()
                self.own_seconds = thread_time()
        except BaseException as error:  # noqa: BLE001 - raised where it is heard
            self._error = error

    def _sample(self) -> None:
        now, reading = perf_counter(), self._read()
        self._ledger.add(now, reading, self._progress())
        if self._series is not None:
            self._series.add(self._reading, reading, passed=now - self._last, epoch=self.epoch)
        self._reading, self._last = reading, now
        self.num_samples += 1

    def _read(self) -> Reading:
        reading: Reading = {}
        for source in self._sources:
            reading |= attempt(source.read) or {}
        return reading
