"""Whose is what an interval used: counters and phases, read together now and then, to an amount for each phase.

    ledger.add(now, {"read_bytes": 4096.0, …}, clock.progress())
    ledger.take().amounts["read_bytes"]["input"]

The clock tells a phase when it is over. So of an interval the part up to the last mark is dealt out, in proportion to the seconds
that each phase had in it; the rest waits until the next mark tells what it was. What passed outside the phases is `other`. Nothing
is lost on the way: the phases and `other` sum up to the whole.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, final

from deepex.machine.sampling.source import COUNTERS, LEVELS, Reading
from deepex.record.clock import PHASES, Progress

OTHER: Final = "other"
EPOCH: Final = "epoch"


@dataclass(frozen=True, kw_only=True)
class Used:
    """Amounts by phase, and the highest levels. `by_phase` is false where all of it is under `epoch`."""

    amounts: dict[str, dict[str, float]]
    peaks: dict[str, float]
    by_phase: bool


@final
class Ledger:
    """What was used since the last `take`. Not for several threads at once."""

    def __init__(self) -> None:
        self._last: Reading = {}
        self._waiting: dict[str, float] = {}  # used since the last mark
        self._amounts: dict[str, dict[str, float]] = {}
        self._peaks: dict[str, float] = {}
        self._before: Progress | None = None
        self._marked_cpu: tuple[float, ...] = ()  # at the last `take`

    def begin(self, now: float, reading: Reading, progress: Progress | None) -> None:
        """Count from here."""
        self._last = dict(reading)
        self.settle(now, progress)
        self._clear(progress)

    def add(self, now: float, reading: Reading, progress: Progress | None) -> None:
        """Deal out what was used since the last reading."""
        shares = self._shares(now, progress)
        for name in COUNTERS:
            if name in reading:
                self._deal(name, reading[name] - self._last.get(name, reading[name]), shares)
        for name in LEVELS:
            if name in reading:
                self._peaks[name] = max(reading[name], self._peaks.get(name, 0.0))
        self._last |= reading
        if progress is not None and self._before is not None:  # what came before a `take` is told
            self._before = progress._replace(marked=max(progress.marked, self._before.marked))

    def settle(self, now: float, progress: Progress | None) -> None:
        """No phase is under way: what waits for a mark is in none."""
        for name, amount in self._waiting.items():
            self._amounts[name][OTHER] += amount
        self._waiting = {}
        self._before = None if progress is None else progress._replace(marked=now)

    def take(self, now: float, progress: Progress | None) -> Used:
        """Everything since the last time; no phase is under way."""
        self.settle(now, progress)
        amounts = self._amounts
        if progress is not None and "cpu_seconds" in amounts:
            amounts["cpu_seconds"] = self._cpu_seconds(sum(amounts["cpu_seconds"].values()), progress)
        places = (*PHASES, OTHER) if progress is not None else (EPOCH,)
        used = Used(
            amounts={name: {place: by[place] for place in places} for name, by in amounts.items()},
            peaks=self._peaks,
            by_phase=progress is not None,
        )
        self._clear(progress)
        return used

    def _clear(self, progress: Progress | None) -> None:
        self._amounts, self._peaks = {}, {}
        self._marked_cpu = () if progress is None else progress.cpu_seconds

    def _deal(self, name: str, amount: float, shares: dict[str, float]) -> None:
        whole = self._waiting.get(name, 0.0) + max(0.0, amount)
        places = self._amounts.setdefault(name, defaultdict(float))
        for place, share in shares.items():
            places[place] += whole * share
        self._waiting[name] = whole * max(0.0, 1.0 - sum(shares.values()))

    def _shares(self, now: float, progress: Progress | None) -> dict[str, float]:
        """Of all since the mark before this reading's last, the share of each phase; what is left of 1 is not yet known."""
        if progress is None or self._before is None:
            return {EPOCH: 1.0} if progress is None else {}
        before = self._before
        passed = [max(0.0, new - old) for new, old in zip(progress.seconds, before.seconds, strict=True)]
        known = max(progress.marked - before.marked, sum(passed))
        span = max(now - before.marked, known)
        if span <= 0.0:
            return {}
        shares = {phase: seconds / span for phase, seconds in zip(PHASES, passed, strict=True)}
        return {**shares, OTHER: (known - sum(passed)) / span}

    def _cpu_seconds(self, total: float, progress: Progress) -> dict[str, float]:
        """As the clock read them at every mark; the rest is `other`."""
        found = [new - old for new, old in zip(progress.cpu_seconds, self._marked_cpu, strict=True)]
        return {**dict(zip(PHASES, found, strict=True)), OTHER: max(0.0, total - sum(found))}
