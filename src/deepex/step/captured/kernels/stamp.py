"""The phase clock of captured steps: the device reads its own timer between phases, inside the graph and outside it.

    clock = StampClock(device)
    clock.mark(FORWARD)       # a launch of one thread: what passed since the last mark belongs to forward

An event recorded in a graph would be overwritten by each replay, before anybody could read it without waiting. So each mark adds to
sums that stay on the device, and one read at the end of an epoch fetches them. A mark takes less than a microsecond of the device.
"""

from typing import Final, final

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from typing_extensions import override

from deepex.record.clock import PHASES, PhaseClock

_NONE: Final = len(PHASES)  # the sum of what belongs to no phase


@triton.jit
def stamp_kernel(sums, phase):
    """`sums`: nanoseconds of each phase, of none, and the time of the last mark."""
    now = cuda.globaltimer()
    last = tl.load(sums + 6)
    tl.store(sums + phase, tl.load(sums + phase) + now - last)
    tl.store(sums + 6, now)


@final
class StampClock(PhaseClock):
    """Phases by the device's timer, on whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(PHASES) + 2, dtype=torch.int64, device=device)

    @override
    def start(self) -> None:
        self.mark(_NONE)

    @override
    def mark(self, phase: int) -> None:
        stamp_kernel[(1,)](self._sums, phase, num_warps=1)

    @override
    def seconds(self) -> dict[str, float]:
        return {name: nanoseconds * 1e-9 for name, nanoseconds in zip(PHASES, self._sums.tolist(), strict=False)}

    @override
    def reset(self) -> None:
        self._sums[:_NONE].zero_()
