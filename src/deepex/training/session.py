"""The training loop: epochs, stretches, turns, steps, and a call where replicas meet; with the checkpoints, and when to end.

    with Session(parts, run, watcher) as session:
        outcome = session.train(Position())

Every rank runs it; rank 0 writes. The ranks decide alike because they decide from the same numbers: one small gather at the end of
each epoch, and the requests to stop that travel within each sync.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deepex.record import RunDirectory, Target
from deepex.sync.meeting import Stretch
from deepex.training import checkpoint as checkpoints
from deepex.training.book import EpochBook, EpochProgress
from deepex.training.checkpoint import Position
from deepex.training.learner import Learner
from deepex.training.parts import Parts
from deepex.training.stop import StopPoll, StopSignals
from deepex.training.usage import UsageWatch
from deepex.training.watch import Watcher


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: `finished`, or `stopped` by a signal; then it can be resumed at `position`."""

    status: str
    reason: str
    position: Position


def run_stretch(
    learner: Learner,
    stretch: Stretch,
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
    stepped: Callable[[int], None] = lambda _samples: None,
) -> int:
    """Run the steps of a stretch on every replica of this rank; all meet.

    Gives the step reached: earlier than planned only for a run of one replica that was asked to stop; nobody waits for it.
    """
    meeting, alone, stop = learner.parts.meeting, learner.parts.job.replicas == 1, stretch[1]
    learner.open(stretch)
    for some in meeting.rounds(*stretch):
        for turn in some.turns:
            reached = learner.take(turn, stepped=stepped, stopped=lambda: alone and asked_to_stop())
            stop = reached if reached < turn.stop else stop
        meeting.reach(some, request=float(asked_to_stop()), rate=learner.rate)  # the collective, here and nowhere else
    learner.agreed(stop)
    return stop


class Session:
    """Trains with these parts until the epochs are done, the target is reached, or somebody asks to stop; then closes them."""

    def __init__(self, parts: Parts, run: RunDirectory, watcher: Watcher) -> None:
        config = parts.job.config
        self.parts, self._run = parts, run
        self._watcher = watcher if parts.comm.rank == 0 else Watcher()
        self.learner = Learner(parts)
        self.usage = UsageWatch(config.sampling, parts.job.device, parts.comm, run, parts.clock)
        self._book = EpochBook(self.learner, run, self.usage)
        self._target = Target.parse(str(config.target)) if config.target else None
        self._signals, self._poll = StopSignals(), StopPoll(parts.job.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.parts.close()

    # --- the loop

    def train(self, position: Position) -> Outcome:
        """Train from `position` to the end. Collective."""
        with self._signals, self.usage:
            reached, stopped = self._had_reached_target(position), False
            while position.epoch < self.parts.job.config.epochs and not reached and not stopped:
                position, stopped, reached = self._epoch(position)
            done = reached or position.epoch == self.parts.job.config.epochs
            self._signals.stopped = stopped and not done
        self.parts.meeting.release()
        return self._outcome(position, reached=reached, stopped=stopped and not done)

    def _epoch(self, position: Position) -> tuple[Position, bool, bool]:
        """Train an epoch, or the rest of one: the position after it, whether to stop, and whether it reached the target."""
        learner, agreement, stopped = self.learner, self.parts.meeting.agreement, False
        progress = self._book.open(position)
        self._watcher.epoch_began(position.epoch + 1, progress.samples)
        self.usage.epoch_began(position.epoch + 1)
        learner.begin_epoch(position.epoch, position.step, position.syncs, worst=position.worst)
        for start, planned in learner.stretches():
            with self.parts.comm.because(f"sync {progress.syncs + 1} of epoch {position.epoch + 1}"):
                stop = run_stretch(learner, (start, planned), asked_to_stop=self._is_asked_to_stop, stepped=self._watcher.stepped)
            progress.syncs += 1
            stopped = self._poll.stop(agreement.requests) or stop < planned
            learner.look(stop)
            if stop < self.parts.job.shards.steps and self._is_checkpoint_due(progress.syncs, stopped=stopped):
                here = self._save_within(stop, progress)
                if stopped:
                    return here, True, False
        record = self._book.close(progress)
        stopped = stopped or self._poll.settled()
        reached = self._target is not None and self._target.reached(record)
        after = Position(position.epoch + 1, worst=max(position.worst, record.train.loss))
        self._save_after(after, last=stopped or reached)
        self._watcher.epoch_ended(record)
        return after, stopped, reached

    # --- what surrounds it

    def resume(self, *, kept: bool) -> None:
        """Go on from a checkpoint that has been read, and had something beside the arena, or not. Collective."""
        agreement = self.parts.meeting.agreement
        if kept:
            agreement.resume()
        else:
            agreement.start()

    def delivered(self, epoch: int) -> AbstractContextManager[None]:
        """The network as it is validated and given to its user, within. Collective."""
        return self._book.delivered(epoch)

    def _is_asked_to_stop(self) -> bool:
        return self._signals.received is not None

    def _is_checkpoint_due(self, syncs: int, *, stopped: bool) -> bool:
        every = self.parts.job.config.checkpoint.syncs
        return stopped or bool(every and syncs % every == 0)

    def _had_reached_target(self, position: Position) -> bool:
        """Whether the last epoch before a resume reached the target, as of a run that was killed before it could say so."""
        if self._target is None or position.epoch == 0 or position.step > 0:
            return False
        last = self._run.epochs()[-1:] if self.parts.comm.rank == 0 else []
        reached = any(record.epoch == position.epoch and self._target.reached(record) for record in last)
        return bool(self.parts.comm.gather(reached)[0])

    def _outcome(self, position: Position, *, reached: bool, stopped: bool) -> Outcome:
        config = self.parts.job.config
        if stopped:
            by = self._signals.received or "a signal to another rank"
            return Outcome(status="stopped", reason=f"stopped by {by}", position=position)
        done = f"{config.epochs} epochs done" if config.epochs != 1 else "1 epoch done"
        return Outcome(status="finished", reason=f"target reached: {config.target}" if reached else done, position=position)

    def _save_within(self, stop: int, progress: EpochProgress) -> Position:
        """Write a checkpoint in the middle of an epoch, which is in none of the phases."""
        here = self._book.position(stop, progress)
        self.usage.pause()
        self._save(here)
        self.usage.pause()
        self.parts.clock.start()
        return here

    def _save_after(self, position: Position, *, last: bool) -> None:
        config = self.parts.job.config
        if last or position.epoch == config.epochs or position.epoch % config.checkpoint.epochs == 0:
            self._save(position)

    def _save(self, position: Position) -> None:
        parts = self.parts
        checkpoints.save(
            self._run.checkpoints,
            position,
            parts.arena,
            parts.network,
            comm=parts.comm,
            replicas=parts.job.replicas,
            kept=self.learner.kept(),
            rule=parts.rule.state,
            keep=parts.job.config.checkpoint.keep,
            run=self._run.id if parts.comm.rank == 0 else "",
        )
