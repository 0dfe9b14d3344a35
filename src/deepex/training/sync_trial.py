"""How many steps a sync takes, tried before a run begins; what `auto` leaves to that is settled by it.

trial = SyncTrial(job, comm, optimiser, step, runner)        # collective
job = trial.settle(job)                                  # collective
rule.measured(trial.steps_for(nbytes))                   # collective
"""

from dataclasses import replace
from time import perf_counter
from typing import Final

import torch

from deepex.arena.optimiser.base import Optimiser
from deepex.comm import Communicator
from deepex.step.eager import EagerStep
from deepex.step.runner import Runner
from deepex.sync.how.auto import is_undecided
from deepex.training.job import Job
from deepex.training.settle import SyncTimes
from deepex.training.synced import synced_slice

_TRIALS: Final = 3


def wants_trial(job: Job) -> bool:
    """Whether something follows from how long a sync takes, and may: not from a clock, where bits are promised."""
    sync = job.config.sync
    wanted = sync.rule().wants_times or is_undecided(sync)
    return wanted and job.replicas > 1 and not (job.config.deterministic and not sync.cost)


class SyncTrial:
    """A step and a sync of the slowest rank, on an arena that has its initial weights. Its methods are collective.

    `sync.cost` of the configuration is believed, and then nothing is measured.
    """

    def __init__(self, job: Job, comm: Communicator, optimiser: Optimiser, step: EagerStep, runner: Runner) -> None:
        self._comm, self._arena, self._told = comm, optimiser.arena, job.config.sync.cost
        self._synced = synced_slice(job, optimiser)
        self._step_seconds = 0.0
        if not self._told:
            seconds = runner.step_seconds or step.trial_seconds(job.shards.batch)
            self._step_seconds = float(max(comm.gather(seconds * (job.replicas // comm.size))))
        agreed = self._synced.agreed.nbytes
        self._cost = self._told or self._sum_seconds(agreed) / self._step_seconds

    def steps_for(self, nbytes: int) -> float:
        """How many steps a sum takes: at least what is due to it of the whole. A few may slip through a network unhindered."""
        due = self._cost * nbytes / self._synced.agreed.nbytes
        return due if self._told else max(due, self._sum_seconds(nbytes) / self._step_seconds)

    def settle(self, job: Job) -> Job:
        """The job, with what it left to these times."""
        sync = job.config.sync
        if not is_undecided(sync):
            return job
        hides = self._could_hide()
        part = self.steps_for(self._arena.model.nbytes // sync.parts) if hides else self._cost
        return job.settled(replace(job.facts, times=SyncTimes(cost=self._cost, part=part, hides=hides)))

    def _could_hide(self) -> bool:
        """Whether syncs in the background may be of use: not to ranks that add up where the weights lie, on the cores that train.

        Nor without momentum: means that come late do not hold a replica that is about to leave its valley then.
        """
        shares = self._comm.shares(self._arena.memory)
        return self._synced.momentum_ahead is not None and self._comm.overlaps and (bool(self._told) or not shares)

    def _sum_seconds(self, nbytes: int) -> float:
        """How long the slowest rank takes for a sum; on an optimiser's states, which are zero before the first step."""
        arena, seconds = self._arena, list[float]()
        states = arena.all_states if arena.states else torch.zeros_like(arena.weights)
        some = states[: -(-nbytes // states.itemsize)]
        for _ in range(_TRIALS):
            self._comm.barrier()
            began = perf_counter()
            self._comm.sum(some)
            if some.device.type == "cuda":
                torch.cuda.synchronize(some.device)
            seconds.append(perf_counter() - began)
        return float(max(self._comm.gather(sorted(seconds)[_TRIALS // 2]))) * nbytes / some.nbytes
