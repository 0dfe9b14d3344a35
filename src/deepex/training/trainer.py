"""The training loop: epochs, their records and checkpoints, and when to end.

    trainer = Trainer(job, comm, run, watcher)
    trainer.begin(resumed=False)
    outcome = trainer.run(Position())

Every rank runs it; rank 0 writes. The ranks decide alike because they decide from the same numbers: one small gather at the end of
each epoch, and the requests to stop that travel within each sync.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from deepex.comm import Communicator
from deepex.comm.together import AgreedError
from deepex.data.feeds import read_counter
from deepex.errors import DamagedError, DivergedError
from deepex.machine.sampling.usage import LENGTH, usage_of
from deepex.record import PHASES, EpochRecord, RunDirectory, Score, Target
from deepex.record.clock import PhaseClock
from deepex.training import checkpoint as checkpoints
from deepex.training.checkpoint import Checkpoint, Position
from deepex.training.evaluate import Evaluator
from deepex.training.job import Job
from deepex.training.learner import Learner
from deepex.training.rows import RowLayout, score_of
from deepex.training.stop import StopPoll, StopSignals
from deepex.training.usage import UsageWatch
from deepex.training.watch import Watcher


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: `finished`, or `stopped` by a signal; then it can be resumed at `position`."""

    status: str
    reason: str
    position: Position


class Trainer:
    """Trains a job on the ranks of `comm`. `clock` replaces the phase clock, for the benchmark of what measuring costs."""

    def __init__(
        self, job: Job, comm: Communicator, run: RunDirectory, watcher: Watcher, *, clock: PhaseClock | None = None
    ) -> None:
        self._comm, self._run = comm, run
        self._watcher = watcher if comm.rank == 0 else Watcher()
        self.learner = Learner(job, comm, clock)
        self._evaluator = _make_evaluator(job, comm)
        measures = len(self.learner.task.measures)
        self._within = RowLayout(train=measures + 2, lost=1, drift=None)
        self._whole = RowLayout(
            train=measures + 2, lost=1, times=len(PHASES) + 1, validation=measures + 3, reads=4, usage=LENGTH, drift=None
        )
        self._target = Target.parse(str(job.config.target)) if job.config.target else None
        self._kept = False  # whether a checkpoint had anything beside the arena
        self._signals, self._poll = StopSignals(), StopPoll(job.device)
        self.usage = UsageWatch(job.config.sampling, job.device, comm, run, self.learner.clock)

    @property
    def job(self) -> Job:
        """What is trained; its plan is settled to the last when the first step begins."""
        return self.learner.job

    def prepare(self, *, resuming: bool) -> None:
        """Make what a checkpoint is read into. Collective."""
        if resuming:
            self.learner.meet()

    def restore(self, checkpoint: Checkpoint) -> Position:
        """Read the state of a checkpoint; without communication, so that all ranks can take the one before if it is damaged."""
        learner = self.learner
        checkpoints.restore(checkpoint, learner.arena, learner.network)
        checkpoints.restore_states(checkpoint, learner.states.stored(), learner.replicas[0], learner.arena)
        self._kept = checkpoints.restore_state(checkpoint, learner.meeting.agreement.state(), learner.replicas[0])
        learner.rule.restore(checkpoint.header.get("rule", {}))
        position = checkpoint.position
        if position.apart and learner.meeting.drift is not None:
            try:
                learner.meeting.drift.restore(round(position.apart[0]), position.apart[1:])
            except RuntimeError as error:  # of another length
                raise DamagedError(f"checkpoint {checkpoint.path} is damaged: its 'apart' is {position.apart}") from error
        return position

    def begin(self, *, resumed: bool) -> None:
        """Begin from rank 0's initial weights, or go on from what was restored. Collective."""
        learner = self.learner
        if not resumed:
            self._comm.broadcast(learner.arena.state)
            learner.try_times()
            learner.start()
        elif self._kept:
            learner.meeting.agreement.resume()
        else:
            learner.meeting.agreement.start()

    def close(self) -> None:
        """Stop what reads, and what talks in the background."""
        self.learner.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def run(self, position: Position) -> Outcome:
        """Train from `position` to the end."""
        try:
            with self._signals, self.usage:
                outcome = self._epochs(position)
        finally:
            self.close()
        self.learner.meeting.release()
        return outcome

    def _epochs(self, position: Position) -> Outcome:
        reached, stopped = self._had_reached_target(position), False
        while position.epoch < self.job.config.epochs and not reached:
            if stopped:
                self._signals.stopped = True
                by = self._signals.received or "a signal to another rank"
                return Outcome(status="stopped", reason=f"stopped by {by}", position=position)
            position, stopped, reached = self._epoch(position)
        done = f"{self.job.config.epochs} epochs done" if self.job.config.epochs != 1 else "1 epoch done"
        reason = f"target reached: {self.job.config.target}" if reached else done
        return Outcome(status="finished", reason=reason, position=position)

    def _had_reached_target(self, position: Position) -> bool:
        """Whether the last epoch before a resume reached the target, as of a run that was killed before it could say so."""
        if self._target is None or position.epoch == 0 or position.step > 0:
            return False
        last = self._run.epochs()[-1:] if self._comm.rank == 0 else []
        reached = any(record.epoch == position.epoch and self._target.reached(record) for record in last)
        return bool(self._comm.gather(reached)[0])

    def _epoch(self, position: Position) -> tuple[Position, bool, bool]:
        """Train an epoch, or the rest of one: the position after it, whether to stop, and whether it reached the target."""
        epoch, shards, learner = position.epoch, self.job.shards, self.learner
        mine = sum(shards.samples(replica, position.step, shards.steps) for replica in learner.replicas)
        self._watcher.epoch_began(epoch + 1, mine)
        self.usage.epoch_began(epoch + 1)
        began, syncs, stopped = perf_counter(), position.syncs, False
        learner.begin_epoch(epoch, position.step, position.syncs, worst=position.worst)
        while learner.plan:
            start, planned = learner.plan.popleft()
            with self._comm.because(f"sync {syncs + 1} of epoch {epoch + 1}"):
                stop = run_stretch(learner, start, planned, asked_to_stop=self._asked_to_stop, stepped=self._watcher.stepped)
            syncs += 1
            stopped = self._poll.stop(learner.requests) or stop < planned
            learner.look(stop)
            every = self.job.config.checkpoint.syncs
            if stop < shards.steps and (stopped or (every and syncs % every == 0)):
                here = self._position(epoch, stop, syncs, position)
                self.usage.pause()
                self._save(here)
                if stopped:
                    return here, True, False
                self.usage.pause()
                learner.clock.start()  # writing a checkpoint is none of the phases
        record = self._end_epoch(position, syncs, mine, began)
        stopped = stopped or self._poll.settled()
        worst = max(position.worst, record.train.loss)
        after, ends = Position(epoch + 1, worst=worst), epoch + 1 == self.job.config.epochs
        reached = self._target is not None and self._target.reached(record)
        if stopped or ends or reached or (epoch + 1) % self.job.config.checkpoint.epochs == 0:
            self._save(after)
        self._watcher.epoch_ended(record)
        return after, stopped, reached

    def _asked_to_stop(self) -> bool:
        return self._signals.received is not None

    def _position(self, epoch: int, step: int, syncs: int, before: Position) -> Position:
        """A position within an epoch: what all ranks have summed up so far goes with it."""
        shards = self.job.shards
        self.learner.check_network()
        mine = sum(shards.samples(replica, before.step, step) for replica in self.learner.replicas) - self.learner.lost_samples
        train = [*self.learner.runner.sums.tolist(), mine]
        row = self._within.pack(train=train, lost=[self.learner.lost], drift=self.learner.drift_row())
        rows = self._comm.gather_rows(row)
        train_rows, lost = self._within.of(rows, "train"), self._within.of(rows, "lost")
        self._check_finite(epoch, train_rows, lost)
        sums = _added(train_rows, before.sums)
        drift = self.learner.meeting.drift
        apart = (drift.syncs, *self._within.of(rows, "drift").mean(0).tolist()) if drift is not None else ()
        return Position(epoch, step, syncs, tuple(sums), apart, before.lost + round(float(lost.sum())), before.worst)

    def _end_epoch(self, position: Position, syncs: int, mine: int, began: float) -> EpochRecord:
        """Read what the epoch measured, gather it from all ranks, and write the record."""
        phases = self.learner.clock.seconds()
        wall = perf_counter() - began
        sums = self.learner.runner.sums.tolist()
        reads = [*read_counter.take()]
        validation = self._validate(position.epoch)
        self.learner.check_network()
        reads += read_counter.take()
        seen = mine - self.learner.lost_samples
        rows = self._comm.gather_rows(
            self._whole.pack(
                train=[*sums, seen],
                lost=[self.learner.lost],
                times=[*phases.values(), wall],
                validation=validation,
                reads=reads,
                usage=self.usage.row(),
                drift=self.learner.drift_row(),
            )
        )
        of = {name: self._whole.of(rows, name) for name in ("train", "lost", "validation", "drift")}
        self._check_finite(position.epoch, of["train"], of["lost"])
        train = _added(of["train"], position.sums)
        columns = self._whole.columns(rows)
        times = columns["times"]
        apart = self.learner.meeting.drift
        drift, moved = apart.shares(of["drift"]) if apart is not None else ({}, {})
        record = EpochRecord(
            epoch=position.epoch + 1,
            samples=round(train[-1]),
            steps=self.job.shards.steps,
            syncs=syncs,
            rate=self.learner.rate,
            train=score_of(self.learner.task.measures, train),
            seconds=max(times[-1]),
            phases=dict(zip(PHASES, times, strict=False)),
            wall=times[-1],
            validation=self._validation_score(of["validation"]),
            partial=position.step > 0,
            period=self.learner.rule.reason if self.job.replicas > 1 else "",
            drift=drift,
            moved=moved,
            lost=position.lost + round(sum(columns["lost"][0])),
            usage=read_counter.usage(*columns["reads"]) | usage_of(list(map(list, zip(*columns["usage"], strict=True)))),
        )
        self.learner.learn(record)
        if self._comm.rank == 0:
            self._run.append(record)
        self.usage.write()
        return record

    @contextmanager
    def delivered(self, epoch: int) -> Iterator[None]:
        """The network as it is validated and given to its user, within; by default as it is. Collective."""
        if self.learner.statistics is None or self._evaluator is None:
            yield
            return
        with self.learner.statistics.estimated(epoch):
            yield

    def _validate(self, epoch: int) -> list[float]:
        """Loss, sums of the measures, samples and seconds of this rank's part of the validation; zeros where there is none."""
        if self._evaluator is None:
            return [0.0] * (len(self.learner.task.measures) + 3)
        began = perf_counter()
        with self.delivered(epoch), self.learner.arena.keeping_buffers():
            sums = self._evaluator.sums(self.learner.network, self.learner.step, self.learner.task)
        return [*sums, perf_counter() - began]

    def _validation_score(self, rows: torch.Tensor) -> Score | None:
        if self._evaluator is None:
            return None
        sums, seconds = rows[:, :-1].sum(0).tolist(), float(rows[:, -1].max())
        return score_of(self.learner.task.measures, sums, seconds)

    def _check_finite(self, epoch: int, train: torch.Tensor, left_out: torch.Tensor) -> None:
        """Stop when a loss, or a weight, is no longer a number; every rank sees the same and raises the same."""
        lost = ~torch.isfinite(train[:, 0])
        if not bool(torch.isfinite(self.learner.arena.weights.sum())):
            lost |= left_out[:, 0] > 0  # all were, or there would be weights
        elif not lost.any():
            return
        bad = lost.nonzero().flatten().tolist()
        where = f"on rank {', '.join(map(str, bad[:8]))}" if bad else "in the weights, on every rank"
        last = checkpoints.newest(self._run.checkpoints)
        good = f"the last good checkpoint is {last.path}" if last else "there is no checkpoint yet"
        remedy = "lower optim.rate, or warm up (optim.warmup_epochs)"
        kind = self.job.config.sync.kind
        if self.job.replicas > 1 and not kind.leaves_out and not kind.sums_gradients:
            remedy += ", or set sync.strategy=weights, which leaves out a replica that goes astray"
        raise AgreedError(DivergedError(f"the loss of epoch {epoch + 1} is not a number {where}; {good}: {remedy}"))

    def _save(self, position: Position) -> None:
        learner = self.learner
        checkpoints.save(
            self._run.checkpoints,
            position,
            learner.arena,
            learner.network,
            comm=self._comm,
            replicas=self.job.replicas,
            kept=learner.kept(),
            rule=learner.rule.state,
            keep=self.job.config.checkpoint.keep,
            run=self._run.id if self._comm.rank == 0 else "",
        )


def run_stretch(
    learner: Learner,
    start: int,
    planned: int,
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
    stepped: Callable[[int], None] = lambda _samples: None,
) -> int:
    """Run the steps from `start` up to `planned` on every replica of this rank; all meet.

    Gives the step reached: earlier than planned only for a run of one replica that was asked to stop; nobody waits for it.
    """
    alone, stop = learner.job.replicas == 1, planned
    learner.open(start, planned)
    for some in learner.meeting.rounds(start, planned):
        for turn in some.turns:
            reached = learner.take(turn, stepped=stepped, stopped=lambda: alone and asked_to_stop())
            stop = reached if reached < turn.stop else stop
        learner.meeting.reach(some, request=float(asked_to_stop()), rate=learner.rate)  # the collective, here and nowhere else
    learner.agreed(stop)
    return stop


def _added(rows: torch.Tensor, before: tuple[float, ...]) -> list[float]:
    """The sums over all ranks, with those from before a resume."""
    sums: list[float] = rows.sum(0).tolist()
    return [total + old for total, old in zip(sums, before, strict=True)] if any(before) else sums


def _make_evaluator(job: Job, comm: Communicator) -> Evaluator | None:
    if job.config.validate == "none" or "validation" not in job.dataset.manifest.parts:
        return None
    return Evaluator(
        job.dataset.part("validation"),
        comm,
        how=job.config.validate,
        batch=max(job.config.batch, 64),
        device=job.device,
        placement=job.placement,
        verify=job.config.verify,
    )
