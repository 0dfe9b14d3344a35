"""What parallel training gained, as the paper defines it: per epoch, and in learning.

    base, run = RunDirectory.open(a).epochs(), RunDirectory.open(b).epochs()
    compare(base, run, Target.parse("error <= 0.2"))

Per-epoch speedup is S_p = t_s / t_p, efficiency S_p · ranks of the base / ranks, and learning speedup
S_L = (t_s · N_s) / (t_p · N_p), with t the seconds of an epoch and N the epochs to a target. Pure functions of records.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from deepex.record import EpochRecord, Target
from deepex.speedup.statistics import steady


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A run against its base. There is a learning speedup only if both reached the target; `measured`: no time is predicted."""

    base_ranks: int
    ranks: int
    base_epoch_seconds: float
    epoch_seconds: float
    measured: bool
    target: str | None = None
    base_epochs: int | None = None
    epochs: int | None = None

    @property
    def per_epoch(self) -> float:
        """S_p."""
        return self.base_epoch_seconds / self.epoch_seconds

    @property
    def efficiency(self) -> float:
        """The share of the ideal speedup, ranks / base ranks, that was reached."""
        return self.per_epoch * self.base_ranks / self.ranks

    @property
    def learning(self) -> float | None:
        """S_L."""
        if self.base_epochs is None or self.epochs is None:
            return None
        return self.per_epoch * self.base_epochs / self.epochs


def epoch_seconds(epochs: Sequence[EpochRecord]) -> float:
    """Median seconds of a steady epoch."""
    return median(epoch.seconds for epoch in steady(epochs))


def compare(base: Sequence[EpochRecord], run: Sequence[EpochRecord], target: Target | None = None) -> Speedup:
    """Compare a run with its base, and, with a target, their learning."""
    return Speedup(
        base_epoch_seconds=epoch_seconds(base),
        epoch_seconds=epoch_seconds(run),
        base_ranks=base[-1].ranks,
        ranks=run[-1].ranks,
        measured=all(epoch.measured for epoch in (*base, *run)),
        target=None if target is None else str(target),
        base_epochs=None if target is None else target.epochs(base),
        epochs=None if target is None else target.epochs(run),
    )
