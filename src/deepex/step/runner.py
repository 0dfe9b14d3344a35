"""How a rank runs the steps of a turn: one by one here, or as replays of a captured step (captured.py).

runner.begin(epoch, turns)
for steps, samples in runner.steps(epoch, turn):
    …                                   # so many more steps are queued
runner.update(rate)                     # where gradients are agreed on: after the sync
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from typing_extensions import override

from deepex.arena.arena import Arena
from deepex.arena.optimiser.base import Optimiser
from deepex.data.feeds.feed import Feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.prepare import Prepare
from deepex.record.clock import BACKWARD, FORWARD, INPUT, UPDATE, PhaseClock
from deepex.step.eager import EagerStep, seed_step
from deepex.task.task import Task

Rate = Callable[[int, int], float]  # of an epoch and a step


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """How steps are run, and why; `fusions` counts what is computed together."""

    kind: str
    reason: str
    fusions: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What of a run's configuration, under the same names there, decides how its steps are run."""

    step: str = "auto"
    precision: str = "fp32"
    fuse: bool = True
    layout: str = "contiguous"
    deterministic: bool = False
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What a runner is made of.

    `updates`: whether a step ends with an update, or with gradients that replicas agree on. `turn_steps`: of the longest turn.
    """

    options: StepOptions
    network: nn.Module
    arena: Arena
    task: Task
    prepare: Prepare
    feed: Feed
    samples: Samples
    optimiser: Optimiser
    rate: Rate
    updates: bool
    turn_steps: int


class Runner(ABC):
    """Runs the steps of this rank's replicas on the arena; loss and measure are summed on the device in `sums`.

    `step_seconds`: how long a step takes, where that was measured; else 0.
    """

    sums: torch.Tensor
    choice: StepChoice
    step_seconds = 0.0

    @abstractmethod
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        """Get ready for the turns of an epoch, or of a part of one, in their order."""

    @abstractmethod
    def steps(self, epoch: int, turn: Turn) -> Iterator[tuple[int, int]]:
        """Run a turn; yields how many steps and samples were queued since the last time. May be left early."""

    @abstractmethod
    def update(self, rate: float) -> None:
        """Update the weights from the arena's gradients."""


@final
class EagerRunner(Runner):
    """PyTorch's operators one by one."""

    def __init__(self, inputs: StepInputs, step: EagerStep, clock: PhaseClock, choice: StepChoice) -> None:
        self._inputs, self._step, self._clock = inputs, step, clock
        self.sums, self.choice = step.sums, choice

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._inputs.feed.begin(epoch, turns)

    @override
    def steps(self, epoch: int, turn: Turn) -> Iterator[tuple[int, int]]:
        for step in range(turn.start, turn.stop):
            yield 1, self._one(epoch, turn.replica, step)

    @override
    def update(self, rate: float) -> None:
        self._inputs.optimiser.update(rate)

    def _one(self, epoch: int, replica: int, step: int) -> int:
        inputs = self._inputs
        raw, labels = inputs.feed.next()
        seed_step(raw.device, inputs.options.seed, replica, epoch, step)
        images = self._step.prepare(raw, train=True)
        self._clock.mark(INPUT)
        self._step.forward(images, labels)
        self._clock.mark(FORWARD)
        self._step.backward()
        self._clock.mark(BACKWARD)
        if inputs.updates:
            inputs.optimiser.update(inputs.rate(epoch, step))
            self._clock.mark(UPDATE)
        return len(images)
