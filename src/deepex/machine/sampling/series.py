"""The samples of a run one after another, as lines of a file in the run directory; however long the run, below 2,000.

    series = Series(run.path / "resources.jsonl", 0.2)
    series.add(before, after, passed=0.2, epoch=3)
    series.write()

A line has what was used per second since the line before, and the highest levels:

| key | |
|---|---|
| `seconds`, `span_seconds`, `epoch` | since the run began, and since the line before; the epoch in which the line ends |
| `cpu_cores`, `node_cores` | cores kept busy by the first rank of the node, and by everybody there (one that waits for a disk is) |
| `memory_bytes`, `read_bytes_per_second`, `written_bytes_per_second` | of the first rank of the node |
| `disk_read_bytes_per_second`, `disk_written_bytes_per_second`, `network_bytes_per_second`, `cpu_watts` | of the node |
| `gpu_utilisation`, `gpu_memory_bytes`, `gpu_watts` | of the GPU of its first rank |

What cannot be read is not there. A resumed run goes on where its file ends.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Final, final

from deepex.errors import RunError, StorageError
from deepex.machine.sampling.source import Reading
from deepex.record.files import write_atomic
from deepex.record.schema import read_moments

Line = dict[str, float]

MOST_LINES: Final = 2000
_RATES: Final = {
    "cpu_seconds": "cpu_cores",
    "read_bytes": "read_bytes_per_second",
    "written_bytes": "written_bytes_per_second",
    "disk_read_bytes": "disk_read_bytes_per_second",
    "disk_written_bytes": "disk_written_bytes_per_second",
    "network_bytes": "network_bytes_per_second",
    "gpu_busy_seconds": "gpu_utilisation",
    "cpu_joules": "cpu_watts",
    "gpu_joules": "gpu_watts",
}
_PEAKS: Final = ("memory_bytes", "gpu_memory_bytes")
_LATER: Final = ("seconds", "epoch")
_EARLY: Final = 0.25  # of an interval: a sample that comes a little early is still one of its own


@final
class Series:
    """Keeps fewer than `most` lines: when they are so many, two become one, and the interval between them doubles."""

    def __init__(self, path: Path, interval_seconds: float, *, most: int = MOST_LINES, num_cores: int | None = None) -> None:
        self._path, self._most = path, most
        self._num_cores = num_cores or os.cpu_count() or 1
        self._lines: list[Line] = []
        self._pending: Line | None = None
        self._interval_seconds, self._stride = interval_seconds, 1
        self._num_written = 0
        self._seconds = 0.0

    def open(self) -> None:
        """Go on with what a run before this one has left."""
        with suppress(OSError, RunError):
            lines = read_moments(self._path)
            if lines and all("seconds" in line and line.get("span_seconds", 0.0) > 0.0 for line in lines):
                self._lines, self._seconds = lines, lines[-1]["seconds"]
                self._stride = max(1, round(lines[0]["span_seconds"] / self._interval_seconds))
                self._thin()

    def add(self, before: Reading, after: Reading, *, passed: float, epoch: int) -> None:
        """Add what happened within `passed` seconds."""
        if passed <= 0.0:
            return
        self._seconds += passed
        line = self._line(before, after, passed) | {"epoch": epoch}
        self._pending = line if self._pending is None else merged(self._pending, line)
        if self._pending["span_seconds"] >= (self._stride - _EARLY) * self._interval_seconds:
            self._keep()

    def write(self, *, last: bool = False) -> None:
        """Bring the file up to date, without waiting for the disk; a line that is not yet long enough with the `last` words only.

        A file that cannot be written is no reason to end a run.
        """
        if last and self._pending is not None:
            self._keep()
        with suppress(OSError, StorageError):
            if self._num_written == 0 and self._lines:
                write_atomic(self._path, lambda path: _append(path, self._lines), flush=False)
            elif self._num_written < len(self._lines):
                _append(self._path, self._lines[self._num_written :])
            self._num_written = len(self._lines)

    def _keep(self) -> None:
        if self._pending is not None:
            self._lines.append(self._pending)
            self._pending = None
            self._thin()

    def _thin(self) -> None:
        while len(self._lines) >= self._most:
            self._lines = [reduce(merged, self._lines[at : at + 2]) for at in range(0, len(self._lines), 2)]
            self._stride *= 2
            self._num_written = 0

    def _line(self, before: Reading, after: Reading, passed: float) -> Line:
        line = {"seconds": self._seconds, "span_seconds": passed}
        for counter, rate in _RATES.items():
            if counter in before and counter in after:
                line[rate] = max(0.0, after[counter] - before[counter]) / passed
        if "node_idle_seconds" in before and "node_idle_seconds" in after:
            idle = (after["node_idle_seconds"] - before["node_idle_seconds"]) / passed
            line["node_cores"] = min(max(0.0, self._num_cores - idle), float(self._num_cores))
        return line | {name: after[name] for name in _PEAKS if name in after}


def merged(one: Line, next_: Line) -> Line:
    """Two lines as one: rates by time, levels by the higher."""
    first, second = one["span_seconds"], next_["span_seconds"]
    line = {"seconds": next_["seconds"], "span_seconds": first + second}
    for name in dict.fromkeys((*one, *next_)):
        if name in line:
            continue
        if name not in one or name not in next_ or name in _LATER:
            line[name] = next_.get(name, one.get(name, 0.0))
        elif name in _PEAKS:
            line[name] = max(one[name], next_[name])
        else:
            line[name] = (one[name] * first + next_[name] * second) / (first + second)
    return line


def _append(path: Path, lines: Iterable[Line]) -> None:
    text = "".join(json.dumps({name: _short(name, value) for name, value in line.items()}) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _short(name: str, value: float) -> float:
    return round(value, 3) if name in _LATER else float(f"{value:.6g}")
