"""Ends captured runs in the middle of an epoch."""

import os
import signal

import pytest

from deepex.step.captured.runner import CapturedRunner


def stop_after_laps(patch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Send this process SIGTERM when so many laps are queued; the list has a number for each that was queued."""
    laps: list[int] = []
    keep_pace = CapturedRunner._keep_pace

    def counted(self: CapturedRunner) -> None:
        laps.append(len(laps))
        if len(laps) == count:
            os.kill(os.getpid(), signal.SIGTERM)
        keep_pace(self)

    patch.setattr(CapturedRunner, "_keep_pace", counted)
    return laps
