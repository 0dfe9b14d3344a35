"""What an epoch has measured, on all ranks: its record, and what a checkpoint in its middle must know of it.

progress = book.open(position)
…stretches, each of which adds to progress.syncs…
position = book.position(step, progress)        # collective: one gather
record = book.close(progress)                   # collective: the validation, and one gather
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch

from deepex.comm.together import AgreedError
from deepex.data.feeds import read_counter
from deepex.errors import DivergedError
from deepex.machine.sampling.usage import LENGTH, usage_of
from deepex.record import PHASES, EpochRecord, RunDirectory, Score
from deepex.training import checkpoint as checkpoints
from deepex.training.checkpoint import Position
from deepex.training.learner import Learner
from deepex.training.rows import RowLayout, score_of
from deepex.training.usage import UsageWatch


@dataclass(kw_only=True)
class EpochProgress:
    """An epoch, or the rest of one from `start` on; `samples` are this rank's in it. `syncs` counts those of the whole epoch."""

    start: Position
    samples: int
    began: float
    syncs: int


class EpochBook:
    """Gathers the numbers of an epoch from all ranks; rank 0 writes them down."""

    def __init__(self, learner: Learner, run: RunDirectory, usage: UsageWatch) -> None:
        self._learner, self._parts, self._run, self._usage = learner, learner.parts, run, usage
        measures = len(learner.parts.task.measures)
        self._within = RowLayout(train=measures + 2, lost=1, drift=None)
        self._whole = RowLayout(
            train=measures + 2, lost=1, times=len(PHASES) + 1, validation=measures + 3, reads=4, usage=LENGTH, drift=None
        )

    def open(self, position: Position) -> EpochProgress:
        """Begin an epoch."""
        shards = self._parts.job.shards
        return EpochProgress(
            start=position, samples=self._samples(position, shards.steps), began=perf_counter(), syncs=position.syncs
        )

    def position(self, step: int, progress: EpochProgress) -> Position:
        """Where the run is within the epoch: what all ranks have summed up so far goes with it. Collective."""
        self._parts.guard.check()
        before, learner = progress.start, self._learner
        seen = self._samples(before, step) - learner.lost_samples
        train = [*self._parts.runner.sums.tolist(), seen]
        rows = self._parts.comm.gather_rows(self._within.pack(train=train, lost=[learner.lost], drift=learner.drift_row()))
        train_rows, lost = self._within.of(rows, "train"), self._within.of(rows, "lost")
        self._check_finite(before.epoch, train_rows, lost)
        drift = self._parts.meeting.drift
        return Position(
            before.epoch,
            step,
            progress.syncs,
            sums=tuple(_added(train_rows, before.sums)),
            apart=(drift.syncs, *self._within.of(rows, "drift").mean(0).tolist()) if drift is not None else (),
            lost=before.lost + round(float(lost.sum())),
            worst=before.worst,
        )

    def close(self, progress: EpochProgress) -> EpochRecord:
        """Read what the epoch measured, validate, gather it all from all ranks, and write the record. Collective."""
        parts, learner, start = self._parts, self._learner, progress.start
        phases = parts.clock.seconds()
        wall = perf_counter() - progress.began
        sums = parts.runner.sums.tolist()
        reads = [*read_counter.take()]
        validation = self._validate(start.epoch)
        parts.guard.check()
        reads += read_counter.take()
        rows = parts.comm.gather_rows(
            self._whole.pack(
                train=[*sums, progress.samples - learner.lost_samples],
                lost=[learner.lost],
                times=[*phases.values(), wall],
                validation=validation,
                reads=reads,
                usage=self._usage.row(),
                drift=learner.drift_row(),
            )
        )
        of = {name: self._whole.of(rows, name) for name in ("train", "lost", "validation", "drift")}
        self._check_finite(start.epoch, of["train"], of["lost"])
        record = self._record(progress, of, self._whole.columns(rows))
        learner.learn(record)
        if parts.comm.rank == 0:
            self._run.append(record)
        self._usage.write()
        return record

    def delivered(self, epoch: int) -> AbstractContextManager[None]:
        """The network as it is validated and given to its user, within; by default as it is. Collective."""
        if self._parts.statistics is None or self._parts.evaluator is None:
            return nullcontext()
        return self._parts.statistics.estimated(epoch)

    def _record(self, progress: EpochProgress, of: dict[str, torch.Tensor], columns: dict[str, list[list[float]]]) -> EpochRecord:
        parts, start, times = self._parts, progress.start, columns["times"]
        train = _added(of["train"], start.sums)
        apart = parts.meeting.drift
        drift, moved = apart.shares(of["drift"]) if apart is not None else ({}, {})
        return EpochRecord(
            epoch=start.epoch + 1,
            samples=round(train[-1]),
            steps=parts.job.shards.steps,
            syncs=progress.syncs,
            rate=self._learner.rate,
            train=score_of(parts.task.measures, train),
            seconds=max(times[-1]),
            phases=dict(zip(PHASES, times, strict=False)),
            wall=times[-1],
            validation=self._validation_score(of["validation"]),
            partial=start.step > 0,
            period=parts.rule.reason if parts.job.replicas > 1 else "",
            drift=drift,
            moved=moved,
            lost=start.lost + round(sum(columns["lost"][0])),
            usage=read_counter.usage(*columns["reads"]) | usage_of(list(map(list, zip(*columns["usage"], strict=True)))),
        )

    def _validate(self, epoch: int) -> list[float]:
        """Loss, sums of the measures, samples and seconds of this rank's part of the validation; zeros where there is none."""
        parts = self._parts
        if parts.evaluator is None:
            return [0.0] * (len(parts.task.measures) + 3)
        began = perf_counter()
        with self.delivered(epoch), parts.arena.keeping_buffers():
            sums = parts.evaluator.sums(parts.network, parts.step, parts.task)
        return [*sums, perf_counter() - began]

    def _validation_score(self, rows: torch.Tensor) -> Score | None:
        if self._parts.evaluator is None:
            return None
        sums, seconds = rows[:, :-1].sum(0).tolist(), float(rows[:, -1].max())
        return score_of(self._parts.task.measures, sums, seconds)

    def _check_finite(self, epoch: int, train: torch.Tensor, left_out: torch.Tensor) -> None:
        """Stop when a loss, or a weight, is no longer a number; every rank sees the same and raises the same."""
        lost = ~torch.isfinite(train[:, 0])
        if not bool(torch.isfinite(self._parts.arena.weights.sum())):
            lost |= left_out[:, 0] > 0  # all were, or there would be weights
        elif not lost.any():
            return
        bad = lost.nonzero().flatten().tolist()
        where = f"on rank {', '.join(map(str, bad[:8]))}" if bad else "in the weights, on every rank"
        last = checkpoints.newest(self._run.checkpoints)
        good = f"the last good checkpoint is {last.path}" if last else "there is no checkpoint yet"
        remedy = "lower optim.rate, or warm up (optim.warmup_epochs)"
        job = self._parts.job
        if job.replicas > 1 and not job.config.sync.kind.leaves_out and not job.config.sync.kind.sums_gradients:
            remedy += ", or set sync.strategy=weights, which leaves out a replica that goes astray"
        raise AgreedError(DivergedError(f"the loss of epoch {epoch + 1} is not a number {where}; {good}: {remedy}"))

    def _samples(self, start: Position, step: int) -> int:
        """Those of this rank's replicas from a position in an epoch up to a step."""
        return sum(self._parts.job.shards.samples(replica, start.step, step) for replica in self._parts.mine)


def _added(rows: torch.Tensor, before: tuple[float, ...]) -> list[float]:
    """The sums over all ranks, with those from before a resume."""
    sums: list[float] = rows.sum(0).tolist()
    return [total + old for total, old in zip(sums, before, strict=True)] if any(before) else sums
