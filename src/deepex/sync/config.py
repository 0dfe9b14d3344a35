"""What a run says about synchronisation: `--set sync.period=16 --set sync.momentum=reset`."""

from dataclasses import dataclass
from typing import Literal

from deepex.errors import ConfigError
from deepex.sync.period import parse_period


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """When and how replicas agree.

    `strategy`: `weights` (local SGD: the mean of the replicas' weights, every period) or `gradients` (the classical baseline: the
    mean of the gradients, every step).
    `period`: steps between two syncs, `epoch`, or `4 per epoch`. The end of an epoch always syncs: validation, checkpoints and the
    rules that end a run need weights that all replicas share. Left out, it is `epoch` for weights and 1 for gradients.
    `momentum`, at a sync of weights: `average` it like the weights (twice the bytes, and afterwards the replicas are equal in every
    respect), `reset` it to zero, or keep it `local` to each replica.
    """

    strategy: Literal["weights", "gradients"] = "weights"
    period: int | str | None = None
    momentum: Literal["average", "reset", "local"] = "average"

    def __post_init__(self) -> None:
        if self.period is not None:
            parse_period(self.period)
        if self.strategy == "gradients" and self.period not in (None, 1):
            raise ConfigError(
                f"sync.period is {self.period!r}, but gradients are averaged at every step: leave the period out, "
                "or use sync.strategy=weights"
            )
