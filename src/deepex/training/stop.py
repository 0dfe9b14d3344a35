"""Ending a run from outside: SIGTERM (batch systems), SIGINT (a person), SIGUSR1 (Slurm's early warning).

    with StopSignals() as signals:
        …
        signals.received      # "SIGTERM" once it came

The handler only notes the signal. What was asked of one rank reaches the others within the collective of the next
sync, so all of them stop at the same place; `StopPoll` reads the answer without making the device wait.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

import torch

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Notes stop signals while the `with` block runs, and puts the earlier handlers back. A second SIGINT ends at once.

    `stopped` says that the ranks agreed to stop. Where that was another's signal, ours may still be on its way, for they are sent
    one after the other: it must not kill a process that has just written its checkpoint, so all of them are ignored from then on.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.stopped = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals there alone
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.stopped and self.received is None else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class StopPoll:
    """Reads the sum of the ranks' requests after a sync.

    On a CPU at once. On a GPU one sync later, from a pinned copy that travelled meanwhile: every rank reads the same number at the
    same sync, and none waits for its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.zeros(1, pin_memory=True) if device.type == "cuda" else None
        self._copied: Any = None

    def stop(self, requests: torch.Tensor) -> bool:
        """Whether some rank asked to stop, as far as is known by now."""
        if self._pinned is None:
            return bool(requests > 0)
        asked = self.settled()
        self._pinned.copy_(requests.view(1), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return asked

    def settled(self) -> bool:
        """Whether some rank asked at the last sync, on a GPU too: for when its work has been waited for anyway."""
        if self._pinned is None or self._copied is None:
            return False  # a CPU has been told at once
        self._copied.synchronize()
        return bool(self._pinned[0] > 0)
