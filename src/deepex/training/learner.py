"""What one rank does between two syncs, and at a sync: its replicas take turns on the arena, then all ranks agree.

    learner.begin_epoch(epoch, step=0)
    for stretch in learner.stretches():
        learner.open(stretch)
        for some in parts.meeting.rounds(*stretch):
            for turn in some.turns:
                learner.take(turn, stepped=hear, stopped=look)
            parts.meeting.reach(some, request=0.0, rate=learner.rate)       # the collective
        learner.agreed(stop)

Compute phases contain no collective, so a slow rank shows as slow; nothing is read from the device but the loss of long turns.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch

from deepex.data.feeds.samples import Turn
from deepex.record import EpochRecord
from deepex.record.clock import PHASES, SYNC, UPDATE
from deepex.sync.agreement import KeptState
from deepex.sync.meeting import ReplicaTurn, Stretch
from deepex.sync.when.rule import Seen, stretches
from deepex.training.parts import Parts

_ASTRAY: Final = 100.0  # times the highest training loss of an epoch


class Learner:
    """The replicas of one rank, and the plan of their epoch."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._shards = parts.job.shards
        self._updates = not parts.job.config.sync.kind.sums_gradients
        self._plan: list[Stretch] = []  # what is still to be run, the next one last
        self.rate, self._epoch, self._syncs = 0.0, 0, 0
        self.lost, self.lost_samples = 0, 0  # turns of this epoch that were left out, and their samples
        self._most_loss = math.inf  # of a sample

    def begin_epoch(self, epoch: int, step: int, syncs: int = 0, *, worst: float = 0.0) -> None:
        """Plan the syncs of an epoch from `step` on, before which there have been `syncs`, and start its feed.

        A replica whose loss is far above that of the `worst` epoch has lost its way.
        """
        parts = self.parts
        parts.clock.reset()
        parts.runner.sums.zero_()
        self.lost, self.lost_samples = 0, 0
        self._most_loss = _ASTRAY * worst if worst > 0 else math.inf
        if parts.meeting.drift is not None and step == 0:
            parts.meeting.drift.reset()
        self._epoch, self._syncs = epoch, syncs
        parts.rule.begin_epoch(epoch, lambda step: parts.rate(epoch, step))
        self._make_plan(step)

    def stretches(self) -> Iterator[Stretch]:
        """The stretches of the epoch, as they are planned when each begins."""
        while self._plan:
            yield self._plan.pop()

    def look(self, step: int) -> None:
        """Plan the rest of an epoch anew if the rule wants it to be, with the drift seen so far. Collective where it does."""
        drift = self.parts.meeting.drift
        if self._plan or step == self._shards.steps or drift is None:
            return
        rows = self.parts.comm.gather_rows(torch.tensor(drift.read(), dtype=torch.float64))
        self.parts.rule.look(drift.shares(rows)[0]["all"], step)
        drift.reset()  # of stretches of one length, the rule hears more
        self._make_plan(step)

    def _make_plan(self, step: int) -> None:
        parts, meeting = self.parts, self.parts.meeting
        planned = meeting.plan(stretches(parts.rule, step, self._shards.steps))
        self._plan = (planned[:1] if parts.rule.wants_look and meeting.drift is not None else planned)[::-1]
        turns = [self._turn(turn) for stretch in self._plan[::-1] for some in meeting.rounds(*stretch) for turn in some.turns]
        parts.runner.begin(self._epoch, turns)
        parts.clock.start()  # planning is none of the phases

    def open(self, stretch: Stretch) -> None:
        """Begin a stretch."""
        self.parts.counters.open()
        self.parts.meeting.open(*stretch, number=self._syncs, all_parts=stretch[1] == self._shards.steps)

    def take(self, turn: ReplicaTurn, *, stepped: Callable[[int], None], stopped: Callable[[], bool]) -> int:
        """Run a replica's turn, and contribute it. Gives the step reached: earlier than its end only if `stopped` says so."""
        parts, runner = self.parts, self.parts.runner
        parts.meeting.begin(turn)
        if not turn.resumes:
            parts.states.begin(turn.index)
            parts.counters.begin(first=turn.first, opens=turn.opens)
        parts.clock.mark(SYNC)
        careful, done = parts.job.replicas > 1 and parts.meeting.leaves_out, turn.start
        before = runner.sums.clone() if careful else runner.sums
        for steps, samples in runner.steps(self._epoch, self._turn(turn)):
            stepped(samples)
            done += steps
            if done < turn.stop and stopped():
                break
        else:
            done = turn.stop  # of a shard that has ended before
        self.rate = parts.rate(self._epoch, done - 1)
        parts.arena.take_back_buffers()
        if careful:
            self._lose_if_astray(turn, before)
        parts.states.end(turn.index)
        parts.counters.end(turn.index, first=turn.first)
        parts.clock.mark(SYNC)
        parts.meeting.end(turn, self.rate)
        return done

    def agreed(self, stop: int) -> None:
        """Go on from what replicas have agreed on at the end of a stretch."""
        parts = self.parts
        parts.counters.agreed()
        self._syncs += 1
        parts.clock.mark(SYNC)
        if not self._updates:
            self.rate = parts.rate(self._epoch, stop - 1)  # also on a rank whose shards have ended: all update alike
            parts.runner.update(self.rate)
            parts.clock.mark(UPDATE)

    def _lose_if_astray(self, turn: ReplicaTurn, before: torch.Tensor) -> None:
        """Leave out a replica whose loss in this turn was no number, or absurd: of the sums, and of what is agreed on next."""
        parts = self.parts
        samples = self._shards.samples(parts.mine[turn.index], turn.start, turn.stop)
        loss = float(parts.runner.sums[0] - before[0])
        if not samples or (math.isfinite(loss) and loss / samples <= self._most_loss):
            return
        parts.runner.sums.copy_(before)
        parts.arena.all_states.zero_()
        parts.meeting.lose()
        self.lost += 1
        self.lost_samples += samples

    def kept(self) -> KeptState:
        """What a checkpoint must keep beside the arena. Collective."""
        agreement = self.parts.meeting.agreement
        agreement.settle()
        kept = agreement.kept()
        return KeptState(shared=kept.shared, own={**kept.own, **self.parts.states.stored()})

    def drift_row(self) -> list[float]:
        """How far replicas were apart at the syncs of the epoch, or since `look`, for `Drift.shares`."""
        drift = self.parts.meeting.drift
        return drift.read() if drift is not None else []

    def learn(self, record: EpochRecord) -> None:
        """Let the period rule know what an epoch has shown; the record is the same on every rank."""
        if self.parts.job.replicas == 1:
            return
        times = zip(*(record.phases[phase] for phase in PHASES), strict=True)
        rows = [(sum(phases[:SYNC]), phases[SYNC]) for phases in times]
        timed = 0.0 if self.parts.job.config.deterministic else 1.0  # or the next period would follow from a clock
        self.parts.rule.learn(
            Seen(
                epoch=record.epoch,
                loss=record.train.loss,
                validation_loss=record.validation.loss if record.validation is not None else None,
                drift=record.drift.get("all", 0.0),
                step_seconds=timed * max(row[0] for row in rows) / record.steps,
                sync_seconds=timed * min(row[1] for row in rows) / record.syncs,
                steps=record.steps,
                syncs=record.syncs,
                lost=record.lost,
            )
        )

    def _turn(self, turn: ReplicaTurn) -> Turn:
        """A replica's turn; it ends early if its shard does."""
        replica = self.parts.mine[turn.index]
        ends = -(-self._shards.size(replica) // self._shards.batch)
        return Turn(replica, turn.start, max(turn.start, min(turn.stop, ends)))
