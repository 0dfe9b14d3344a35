"""`auto`: the strategy that is best known for a run, from what it is like and how long its syncs take.

That is the plain mean with the period `auto`. Where syncs take so long that hiding them is expected to be faster, they are hidden.
Where an epoch has few steps, as with many replicas, it is Muon at every step, unless that takes much longer than the step. Muon is
taken too wherever it is asked for. With a period, or another outer optimiser, it is the plain mean.

For users: docs/synchronisation.md#strategy-auto
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

from typing_extensions import override

from deepex.sync.how.strategy import slices_of_each
from deepex.sync.how.weights import Weights
from deepex.sync.outer.muon import muon_rate
from deepex.sync.when.auto import AutoPeriod

FEW_STEPS: Final = 100  # in an epoch
_HIDDEN: Final = "background"
_LONGEST_OUTER: Final = 6.0  # steps; a guess: in epochs of 8 steps Muon took 6 epochs to where means of SGD were not after 10
_CLEARLY: Final = 0.9  # of the time of learning with syncs that wait: less, and they are hidden


@final
class AutoStrategy(Weights):
    """What `settled` leaves as it is: the plain mean."""

    name = "auto"
    usual_period = "auto"
    codable = False

    @override
    def slices(self, config: Any, *, per_rank: int, deterministic: bool) -> int:
        if is_undecided(config):
            return slices_of_each(per_rank)
        return super().slices(config, per_rank=per_rank, deterministic=deterministic)


KIND: Final = AutoStrategy


def settled(config: Any, *, replicas: int, steps: int, outer_steps: Callable[[], float]) -> tuple[Any, str]:
    """What `auto` stands for with so many replicas, and steps in an epoch; and why.

    `outer_steps` tells how many steps a step of Muon takes; it is asked only where it matters.
    """
    if config.strategy != AutoStrategy.name:
        return config, "asked for"
    mean = replace(config, period=config.period or "auto")
    if config.period is not None or config.outer not in ("none", "muon"):
        return mean, "auto: the mean of the weights, with the period or outer step that was asked for"
    muon = replace(config, period=1, outer="muon", outer_rate=config.outer_rate or muon_rate(steps), momentum="reset")
    if config.outer == "muon":
        return muon, f"auto: Muon, which was asked for, at each of {steps} steps in an epoch"
    if replicas == 1 or steps >= FEW_STEPS:
        return mean, f"auto: {steps} steps in an epoch are enough for the mean of the weights, with a measured period"
    load = outer_steps()
    few = f"auto: {steps} steps in an epoch are few"
    if load > min(_LONGEST_OUTER, FEW_STEPS / steps):
        return mean, f"{few}, but Muon would take as long as {load:.2g} steps: the mean of the weights, with a measured period"
    return muon, f"{few}: Muon at each, which takes as long as {load:.2g} steps"


def wants_load(config: Any, *, replicas: int, steps: int) -> bool:
    """Whether `settled` will ask for `outer_steps`, which takes a while to find out."""
    asked = config.strategy == AutoStrategy.name and config.period is None and config.outer == "none"
    return bool(asked and replicas > 1 and steps < FEW_STEPS)


def is_undecided(config: Any) -> bool:
    """Whether it depends on how long syncs take if they are to be hidden."""
    return bool(config.strategy == AutoStrategy.name and config.period in (None, "auto") and config.outer == "none")


def timed(config: Any, *, steps: int, cost: float, part: float) -> tuple[Any, str] | None:
    """What `auto` stands for with so many steps in an epoch, if it is no longer the mean of the weights; and why.

    `cost` is how many steps a sync of all replicas takes, `part` how many one of a part in the background.
    """
    hidden = replace(config, strategy=_HIDDEN, period="auto", cost=part if config.cost else 0.0)
    waits, hides = config.rule(), hidden.rule()
    assert isinstance(waits, AutoPeriod)
    assert isinstance(hides, AutoPeriod)
    share = hides.expected(part, steps, last=cost) / waits.expected(cost, steps)
    if share > _CLEARLY or steps < FEW_STEPS:
        return None
    times = f"a sync takes {cost:.2g} steps, one of a part {part:.2g}"
    return hidden, f"auto: {times}: in the background, which is expected to take {share:.0%} of the time of syncs that wait"
