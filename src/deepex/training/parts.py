"""What `build` makes of a job on one rank: each part once, by its name."""

from dataclasses import dataclass

from torch import nn

from deepex.arena.arena import Arena
from deepex.arena.counters import Counters
from deepex.comm import Communicator
from deepex.data.feeds.feed import Feed
from deepex.record.clock import PhaseClock
from deepex.step.eager import EagerStep
from deepex.step.runner import Rate, Runner
from deepex.sync.meeting import Meeting
from deepex.sync.states import ReplicaStates
from deepex.sync.when.rule import PeriodRule
from deepex.task.task import Task
from deepex.training.batch_norm import Statistics
from deepex.training.evaluate import Evaluator
from deepex.training.guard import NetworkGuard
from deepex.training.job import Job


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The `job` is settled to the last. `mine`: the replicas of this rank.

    `step_by_rank`: what each rank would have run its steps with, where they differ. `statistics`: where batch norm's are estimated;
    `evaluator`: where there is something to validate on.
    """

    job: Job
    comm: Communicator
    mine: range
    network: nn.Module
    arena: Arena
    guard: NetworkGuard
    task: Task
    step: EagerStep
    feed: Feed
    rate: Rate
    runner: Runner
    clock: PhaseClock
    step_by_rank: dict[str, list[dict[str, str]]]
    counters: Counters
    states: ReplicaStates
    rule: PeriodRule
    meeting: Meeting
    statistics: Statistics | None
    evaluator: Evaluator | None

    def close(self) -> None:
        """Stop what reads, and what talks in the background."""
        self.feed.close()
        self.meeting.agreement.close()
        if self.evaluator is not None:
            self.evaluator.close()
