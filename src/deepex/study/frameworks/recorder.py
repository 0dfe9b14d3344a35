"""What the ranks of a framework did, as the record of an ordinary run.

    with UsageWatch(…) as usage:
        recorder = Recorder(task, run, usage, watcher)
        training.run(recorder.told)
    recorder.reason        # "3 epochs done", or "target reached: …"

Phases are not measured, since frameworks run them into one another: their times are zero, and what is used is of whole epochs.
"""

from typing import Any

import torch

from deepex.comm.together import AgreedError
from deepex.errors import DivergedError
from deepex.machine.sampling.usage import usage_of
from deepex.record import PHASES, EpochRecord, RunDirectory, Score, Target
from deepex.study.frameworks.base import RankEpoch
from deepex.study.frameworks.task import Task
from deepex.training.usage import UsageWatch
from deepex.training.watch import Watcher

_TRAIN, _SECONDS, _VALIDATION, _VALIDATION_SECONDS, _USAGE = slice(0, 3), 3, slice(4, 7), 7, slice(8, None)  # of a rank's row


class Recorder:
    """Gathers every epoch from all ranks, writes it on rank 0, and decides alike on all when it is enough."""

    def __init__(self, task: Task, run: RunDirectory, usage: UsageWatch, watcher: Watcher) -> None:
        self._task, self._run, self._usage, self._watcher = task, run, usage, watcher
        self._target = Target.parse(str(task.config.target)) if task.config.target else None
        self._done = 0
        self._reached = False

    @property
    def reason(self) -> str:
        """Why the run ended."""
        if self._reached:
            return f"target reached: {self._task.config.target}"
        return f"{self._done} epochs done" if self._done != 1 else "1 epoch done"

    def begin(self) -> None:
        """Let all ranks begin an epoch together. Collective."""
        self._usage.epoch_began(self._done + 1)
        self._task.comm.barrier()

    def told(self, epoch: RankEpoch) -> bool:
        """Record an epoch; whether to go on with the next, which then begins. Collective."""
        train, validation = epoch.train, epoch.validation
        row = [train.loss, train.tally, train.samples, epoch.seconds]
        row += [validation.loss, validation.tally, validation.samples, epoch.validation_seconds, *self._usage.row()]
        rows = self._task.comm.gather_rows(torch.tensor(row, dtype=torch.float64))
        record = self._record(rows)
        if self._task.comm.rank == 0:
            self._run.append(record)
            self._watcher.epoch_ended(record)
        self._usage.write()
        self._done += 1
        self._reached = self._target is not None and self._target.reached(record)
        more = not self._reached and self._done < self._task.config.epochs
        if more:
            self.begin()
        return more

    def _record(self, rows: torch.Tensor) -> EpochRecord:
        task, number = self._task, self._done
        if not bool(torch.isfinite(rows[:, 0]).all()):
            bad = ", ".join(str(rank) for rank in (~torch.isfinite(rows[:, 0])).nonzero().flatten().tolist()[:8])
            raise AgreedError(DivergedError(f"the loss of epoch {number + 1} is not a number on rank {bad}: lower optim.rate"))
        wall = rows[:, _SECONDS].tolist()
        held = rows[:, _VALIDATION].sum(0).tolist()
        return EpochRecord(
            epoch=number + 1,
            samples=round(float(rows[:, 2].sum())),
            steps=task.steps,
            syncs=task.steps if task.comm.size > 1 else 0,
            rate=task.rates(number)[-1],
            train=self._score(rows[:, _TRAIN].sum(0).tolist()),
            seconds=max(wall),
            phases={name: [0.0] * len(wall) for name in PHASES},
            wall=wall,
            validation=self._score(held, seconds=float(rows[:, _VALIDATION_SECONDS].max())) if held[2] else None,
            usage=usage_of(rows[:, _USAGE].tolist()),
        )

    def _score(self, sums: list[float], seconds: float | None = None) -> Score:
        objective, samples = self._task.objective, round(sums[2])
        measure: dict[str, Any] = {objective.measure: objective.value(sums[1], samples)}
        return Score(loss=sums[0] / samples, samples=samples, seconds=seconds, **measure)
