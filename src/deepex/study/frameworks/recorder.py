"""What the ranks of a framework did, as the record of an ordinary run.

    with UsageWatch(…) as usage:
        recorder = Recorder(task, run, usage, watcher)
        training.run(recorder.told)
    recorder.reason        # "3 epochs done", or "target reached: …"

Phases are not measured, since frameworks run them into one another: their times are zero, and what is used is of whole epochs.
"""

import torch

from deepex.comm.together import AgreedError
from deepex.errors import DivergedError
from deepex.machine.sampling.usage import LENGTH, usage_of
from deepex.record import PHASES, EpochRecord, RunDirectory, Target
from deepex.study.frameworks.base import RankEpoch, Sums
from deepex.study.frameworks.workload import Workload
from deepex.training.rows import RowLayout, score_of
from deepex.training.usage import UsageWatch
from deepex.training.watch import Watcher


class Recorder:
    """Gathers every epoch from all ranks, writes it on rank 0, and decides alike on all when it is enough."""

    def __init__(self, task: Workload, run: RunDirectory, usage: UsageWatch, watcher: Watcher) -> None:
        self._task, self._run, self._usage, self._watcher = task, run, usage, watcher
        self._target = Target.parse(str(task.config.target)) if task.config.target else None
        self._measures = task.task.measures
        width = len(self._measures) + 2
        self._layout = RowLayout(train=width, seconds=1, validation=width + 1, usage=LENGTH)
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
        row = self._layout.pack(
            train=self._sums(train),
            seconds=[epoch.seconds],
            validation=[*self._sums(validation), epoch.validation_seconds],
            usage=self._usage.row(),
        )
        rows = self._task.comm.gather_rows(row)
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

    def _sums(self, sums: Sums) -> list[float]:
        return [sums.loss, *(sums.measures or [0.0] * len(self._measures)), sums.samples]

    def _record(self, rows: torch.Tensor) -> EpochRecord:
        task, number = self._task, self._done
        train, held = self._layout.of(rows, "train"), self._layout.of(rows, "validation")
        if not bool(torch.isfinite(train[:, 0]).all()):
            bad = ", ".join(str(rank) for rank in (~torch.isfinite(train[:, 0])).nonzero().flatten().tolist()[:8])
            raise AgreedError(DivergedError(f"the loss of epoch {number + 1} is not a number on rank {bad}: lower optim.rate"))
        wall, sums = self._layout.of(rows, "seconds")[:, 0].tolist(), held[:, :-1].sum(0).tolist()
        return EpochRecord(
            epoch=number + 1,
            samples=round(float(train[:, -1].sum())),
            steps=task.steps,
            syncs=task.steps if task.comm.size > 1 else 0,
            rate=task.rates(number)[-1],
            train=score_of(self._measures, train.sum(0).tolist()),
            seconds=max(wall),
            phases={name: [0.0] * len(wall) for name in PHASES},
            wall=wall,
            validation=score_of(self._measures, sums, float(held[:, -1].max())) if sums[-1] else None,
            usage=usage_of(self._layout.of(rows, "usage").tolist()),
        )
