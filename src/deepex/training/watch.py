"""Who wants to know how a run is going: the trainer tells a watcher, on rank 0; the command line draws bars from it.

class Bars(Watcher):
    def stepped(self, samples): …
"""

from typing import Any

from deepex.record import EpochRecord


class Watcher:
    """Hears of everything and says nothing. Override what you want to hear; `stepped` is called at every step, so keep it quick."""

    def began(self, state: dict[str, Any]) -> None:
        """Hear that the run is set up; `state` is what run.json holds."""

    def epoch_began(self, epoch: int, samples: int) -> None:
        """Hear that epoch number `epoch`, counted from 1, begins; rank 0 will see `samples` samples in it."""

    def stepped(self, samples: int) -> None:
        """Hear that rank 0 finished a step on `samples` samples."""

    def epoch_ended(self, epoch: EpochRecord) -> None:
        """Hear what was recorded."""

    def ended(self, status: str, reason: str) -> None:
        """Hear that the run is over."""

    def closed(self) -> None:
        """Hear that nothing more will come, however the run ended; an error is reported after this."""
