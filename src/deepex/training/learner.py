"""What one rank does between two syncs, and at a sync: its replicas take turns on the arena, then all ranks agree.

    learner.begin_epoch(epoch, step=0)
    while learner.plan:
        start, stop = learner.plan.popleft()
        learner.open(start, stop)
        for some in learner.meeting.rounds(start, stop):
            for turn in some.turns:
                learner.take(turn)
            learner.meeting.reach(some, request=0.0, rate=learner.rate)
        learner.agreed(stop)
        learner.look(stop)

Compute phases contain no collective, so a slow rank shows as slow; nothing is read from the device but the loss of long turns.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Final

import torch

from deepex.arena.arena import Arena
from deepex.arena.counters import Counters
from deepex.arena.held import Held
from deepex.arena.mode import begin_training
from deepex.arena.optimiser import make_optimiser
from deepex.arena.schedule import Schedule
from deepex.comm import Communicator
from deepex.comm.together import together
from deepex.data.feeds.placement import make_feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.prepare import Prepare
from deepex.errors import ConfigError
from deepex.record import EpochRecord
from deepex.record.clock import PHASES, SYNC, UPDATE, PhaseClock
from deepex.step.choose import make_eager, make_runner
from deepex.step.eager import EagerStep
from deepex.step.runner import Runner, StepInputs
from deepex.sync.agreement import KeptState
from deepex.sync.drift import Drift
from deepex.sync.how.auto import is_undecided
from deepex.sync.meeting import ReplicaSet, ReplicaTurn, make_meeting
from deepex.sync.states import make_states
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice
from deepex.sync.when.rule import Seen, stretches
from deepex.task import make_task
from deepex.training.batch_norm import Statistics
from deepex.training.job import Job
from deepex.training.settle import SyncTimes

_TRIALS: Final = 3
_ASTRAY: Final = 100.0  # times the highest training loss of an epoch


class Learner:
    """The replicas of one rank: their shared arena, their feed, their optimiser, and their agreement with the other ranks."""

    def __init__(self, job: Job, comm: Communicator, clock: PhaseClock | None = None) -> None:
        config, manifest = job.config, job.dataset.manifest
        self.job, self._comm = job, comm
        self._shards, self.network = job.shards, begin_training(job.network)
        per_rank = job.replicas // comm.size
        self.replicas = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        self._updates_locally = not config.sync.kind.sums_gradients
        gathers = not self._updates_locally or job.device.type != "cpu"
        self._policies = config.optim.policies(config.sync.momentum)
        self.arena = Arena(
            job.network,
            job.device,
            states=tuple(self._policies),
            channels_last=job.channels_last,
            gathers=gathers,
            zeros=comm.zeros,
            moving=job.moving,
        )
        self._optimiser = make_optimiser(config.optim, self.arena)
        self._held, self._still = Held(self.network), self._sum_still()
        self.task = make_task(config.task)
        prepare = Prepare(
            manifest,
            job.device,
            standardise=self.task.standardise,
            channels_last=job.channels_last,
            augment=config.augment,
        )
        self.step = EagerStep(self.network, self.task, self.arena, prepare, precision=config.precision)
        alike = not self._updates_locally or job.replicas == 1  # then nothing happens to states
        self._counters = Counters(self.network, per_rank)
        self.states = make_states({} if alike else self._policies, self.arena.states, replicas_per_rank=per_rank)
        schedule = Schedule(config.optim, epochs=config.epochs, total_batch=config.batch * job.replicas)
        self._rate = schedule.during(self._shards.steps)  # not a method: this object would hold itself alive
        self.rule = config.sync.rule()
        samples = Samples(
            job.dataset.part("train"),
            self._shards,
            self.replicas,
            seed=config.seed,
            shuffled=manifest.order != "given",
        )
        self.feed = make_feed(job.placement, samples, job.device, comm=comm, verify=config.verify)
        inputs = StepInputs(
            options=config.step_options,
            network=self.network,
            arena=self.arena,
            task=self.task,
            prepare=prepare,
            feed=self.feed,
            samples=samples,
            optimiser=self._optimiser,
            rate=self._rate,
            updates=self._updates_locally,
            turn_steps=self.rule.longest(self._shards.steps),
        )
        steps = config.epochs * self._shards.steps * per_rank
        self.runner, self.clock, self.step_by_rank = self._make_runner(inputs, steps, clock)
        self._peak_rate = schedule.peak
        self.statistics = self._make_statistics() if job.plan.estimates else None
        self.plan: deque[tuple[int, int]] = deque()  # the stretches that are still to be run
        self.rate, self._epoch, self._syncs = 0.0, 0, 0
        self._meets = False  # whether there is a meeting yet
        self.lost, self.lost_samples = 0, 0  # turns of this epoch that were left out, and their samples
        self._most_loss = math.inf  # of a sample

    def check_network(self) -> None:
        """Raise ConfigError if the network has changed what it may not."""
        self._held.check()
        if self.job.replicas > 1 and self._sum_still() != self._still:
            names = ", ".join(repr(slot.name) for slot in self.arena.layout.frozen[:4])
            raise ConfigError(
                f"the network has changed frozen weights, or buffers of a layer in evaluation mode (some of {names} …), and its "
                "replicas do not agree on them, as it did not do so in a first step: let it do so in all, or use one replica"
            )

    def _sum_still(self) -> int:
        """Of the bits of all that should stand still."""
        return int(self.arena.frozen.view(torch.int32).sum(dtype=torch.int64)) if self.job.replicas > 1 else 0

    def _make_runner(
        self, inputs: StepInputs, steps: int, clock: PhaseClock | None
    ) -> tuple[Runner, PhaseClock, dict[str, list[dict[str, str]]]]:
        """The same kind of runner on every rank; what each rank would have taken, where they differ. Collective."""
        comm = self._comm
        try:
            made = together(comm, lambda: make_runner(inputs, self.step, steps=steps, begun=self.job.begun, clock=clock))
            told = comm.gather({"kind": made[0].choice.kind, "reason": made[0].choice.reason})
        except BaseException:
            self.feed.close()
            raise
        if len({one["kind"] for one in told}) == 1:
            return *made, {}
        rank, other = next((rank, one) for rank, one in enumerate(told) if one["kind"] == "eager")
        return *make_eager(inputs, self.step, clock, f"rank {rank} cannot do else, {other['reason']}"), {"by_rank": told}

    def start(self) -> None:
        """Begin from the initial weights, which the arena holds now, or those of a checkpoint that kept nothing beside them."""
        self.meeting.agreement.start()

    def try_times(self) -> None:
        """Measure a step and a sync for `auto`, settle what it leaves to them, and make the meeting. Collective."""
        config, sync = self.job.config, self.job.config.sync
        wanted = self.rule.wants_times or is_undecided(sync)
        if not wanted or self.job.replicas == 1 or (config.deterministic and not sync.cost):
            self.meet()
            return
        agreed = self._synced_slice().agreed.nbytes
        step = 0.0 if sync.cost else self._step_seconds()
        cost = sync.cost or self._sum_seconds(agreed) / step

        def steps_for(nbytes: int) -> float:
            """At least what is due to it of the whole: a few may slip through a network that many would have to wait for."""
            due = cost * nbytes / agreed
            return due if sync.cost else max(due, self._sum_seconds(nbytes) / step)

        if is_undecided(sync):
            hides = self._could_hide()
            part = steps_for(self.arena.model.nbytes // sync.parts) if hides else cost
            times = SyncTimes(cost=cost, part=part, hides=hides)
            self.job = self.job.settled(replace(self.job.facts, times=times))
            self.rule = self.job.config.sync.rule()
        self.meet()
        if self.rule.wants_times:
            self.rule.measured(steps_for(self.sync_bytes))

    def _could_hide(self) -> bool:
        """Whether syncs in the background may be of use: not to ranks that add up where the weights lie, on the cores that train.

        Nor without momentum: means that come late do not hold a replica that is about to leave its valley then.
        """
        told, comm = bool(self.job.config.sync.cost), self._comm
        return self._synced_slice().momentum_ahead is not None and comm.overlaps and (told or not comm.shares(self.arena.memory))

    def _step_seconds(self) -> float:
        """How long the slowest rank takes for a step of all its replicas. Collective."""
        step = self.runner.step_seconds or self.step.trial_seconds(self._shards.batch)
        return float(max(self._comm.gather(step * len(self.replicas))))

    def _sum_seconds(self, nbytes: int) -> float:
        """How long the slowest rank takes for a sum; on an optimiser's states, which are zero before the first step. Collective."""
        arena, seconds = self.arena, list[float]()
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

    def meet(self) -> None:
        """Make the place where replicas agree. Collective."""
        arena, config = self.arena, self.job.config
        replicas = ReplicaSet(replicas=self.job.replicas, samples=self._shards.samples, total=self._shards.total_samples)
        synced = self._synced_slice()
        drift = None
        if self._updates_locally and self.job.replicas > 1:
            tensors = [slot for slot in arena.layout.weights if slot.count]
            matrices = [slot for slot in tensors if len(slot.shape) > 1] or tensors
            spans = [(slot.name, slot.offset, slot.count) for slot in matrices]
            drift = Drift(synced, spans, replicas_per_rank=len(self.replicas))
        self.meeting = make_meeting(
            config.sync,
            synced,
            comm=self._comm,
            replicas=replicas,
            deterministic=config.deterministic,
            peak_rate=self._peak_rate,
            drift=drift,
        )
        self._meets = True
        if self.meeting.agreement.hears is not None:
            arena.listeners.append(self.meeting.agreement.hears)

    def _make_statistics(self) -> Statistics:
        return Statistics(
            self.network,
            self.arena,
            self.step,
            self.feed,
            self._shards,
            comm=self._comm,
            mine=self.replicas,
            deterministic=self.job.config.deterministic,
        )

    def _synced_slice(self) -> SyncedSlice:
        arena, weights = self.arena, self.arena.weights.numel()
        buffers = arena.buffers.numel()
        if not self._updates_locally:
            gradients = arena.gradients.numel()
            held = slice(gradients, gradients + buffers)
            slots = tuple((slot.offset, slot.count) for slot in arena.layout.weights) if arena.moves else ()
            return SyncedSlice(
                agreed=arena.gradients_and_buffers, buffers=held, weights=slice(0, 0), own=held, request=gradients, slots=slots
            )
        agreed, ahead = arena.model_and([*self._policies.values()].count("average")), self._optimiser.ahead()
        return SyncedSlice(
            agreed=agreed,
            buffers=slice(0, buffers),
            weights=slice(buffers, buffers + weights),
            own=slice(0, agreed.numel()),
            request=0,
            lost=1,
            matrices=tuple(
                MatrixSlot(s.offset, s.shape[0], s.count // s.shape[0])
                for s in arena.layout.decayed
                if len(s.shape) > 1 and s.count
            ),
            momentum_ahead=ahead if ahead and self._policies[ahead.state] != "reset" else None,
        )

    @property
    def sync_bytes(self) -> int:
        """What one sync sends and receives per rank, as the size of the buffer that is summed."""
        return self.meeting.agreement.nbytes

    def begin_epoch(self, epoch: int, step: int, syncs: int = 0, *, worst: float = 0.0) -> None:
        """Plan the syncs of an epoch from `step` on, before which there have been `syncs`, and start its feed.

        A replica whose loss is far above that of the `worst` epoch has lost its way.
        """
        self.clock.reset()
        self.runner.sums.zero_()
        self.lost, self.lost_samples = 0, 0
        self._most_loss = _ASTRAY * worst if worst > 0 else math.inf
        if self.meeting.drift is not None and step == 0:
            self.meeting.drift.reset()
        self._epoch, self._syncs = epoch, syncs
        self.rule.begin_epoch(epoch, lambda step: self._rate(epoch, step))
        self._plan(step)

    def look(self, step: int) -> None:
        """Plan the rest of an epoch anew if the rule wants it to be, with the drift seen so far. Collective where it does."""
        if self.plan or step == self._shards.steps or self.meeting.drift is None:
            return
        rows = self._comm.gather_rows(torch.tensor(self.meeting.drift.read(), dtype=torch.float64))
        self.rule.look(self.meeting.drift.shares(rows)[0]["all"], step)
        self.meeting.drift.reset()  # of stretches of one length, the rule hears more
        self._plan(step)

    def _plan(self, step: int) -> None:
        planned = self.meeting.plan(stretches(self.rule, step, self._shards.steps))
        self.plan = deque(planned[:1] if self.rule.wants_look and self.meeting.drift is not None else planned)
        turns = [self._turn(turn) for stretch in self.plan for some in self.meeting.rounds(*stretch) for turn in some.turns]
        self.runner.begin(self._epoch, turns)
        self.clock.start()  # planning is none of the phases

    def open(self, start: int, stop: int) -> None:
        """Begin a stretch."""
        self._counters.open()
        self.meeting.open(start, stop, number=self._syncs, all_parts=stop == self._shards.steps)

    def take(self, turn: ReplicaTurn, *, stepped: Callable[[int], None], stopped: Callable[[], bool]) -> int:
        """Run a replica's turn, and contribute it. Gives the step reached: earlier than its end only if `stopped` says so."""
        self.meeting.begin(turn)
        if not turn.resumes:
            self.states.begin(turn.index)
            self._counters.begin(first=turn.first, opens=turn.opens)
        self.clock.mark(SYNC)
        careful, done = self.job.replicas > 1 and self.meeting.leaves_out, turn.start
        before = self.runner.sums.clone() if careful else self.runner.sums
        for number, samples in self.runner.steps(self._epoch, self._turn(turn)):
            stepped(samples)
            done += number
            if done < turn.stop and stopped():
                break
        else:
            done = turn.stop  # of a shard that has ended before
        self.rate = self._rate(self._epoch, done - 1)
        self.arena.take_back_buffers()
        if careful:
            self._lose_if_astray(turn, before)
        self.states.end(turn.index)
        self._counters.end(turn.index, first=turn.first)
        self.clock.mark(SYNC)
        self.meeting.end(turn, self.rate)
        return done

    def agreed(self, stop: int) -> None:
        """Go on from what replicas have agreed on at the end of a stretch."""
        self._counters.agreed()
        self._syncs += 1
        self.clock.mark(SYNC)
        if not self._updates_locally:
            self.rate = self._rate(self._epoch, stop - 1)  # also on a rank whose shards have ended: all update alike
            self.runner.update(self.rate)
            self.clock.mark(UPDATE)

    def _lose_if_astray(self, turn: ReplicaTurn, before: torch.Tensor) -> None:
        """Leave out a replica whose loss in this turn was no number, or absurd: of the sums, and of what is agreed on next."""
        samples = self._shards.samples(self.replicas[turn.index], turn.start, turn.stop)
        loss = float(self.runner.sums[0] - before[0])
        if not samples or (math.isfinite(loss) and loss / samples <= self._most_loss):
            return
        self.runner.sums.copy_(before)
        self.arena.all_states.zero_()
        self.meeting.lose()
        self.lost += 1
        self.lost_samples += samples

    @property
    def requests(self) -> torch.Tensor:
        """Above zero if some rank was asked to stop, as told at the last sync; on the device."""
        return self.meeting.agreement.requests

    def kept(self) -> KeptState:
        """What a checkpoint must keep beside the arena. Collective."""
        self.meeting.agreement.settle()
        kept = self.meeting.agreement.kept()
        return KeptState(shared=kept.shared, own={**kept.own, **self.states.stored()})

    def drift_row(self) -> list[float]:
        """How far replicas were apart at the syncs of the epoch, or since `look`, for `strategy.drift.shares`."""
        return self.meeting.drift.read() if self.meeting.drift is not None else []

    def learn(self, record: EpochRecord) -> None:
        """Let the period rule know what an epoch has shown; the record is the same on every rank."""
        if self.job.replicas == 1:
            return
        times = zip(*(record.phases[phase] for phase in PHASES), strict=True)
        rows = [(sum(phases[:SYNC]), phases[SYNC]) for phases in times]
        timed = 0.0 if self.job.config.deterministic else 1.0  # or the next period would follow from a clock
        self.rule.learn(
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

    def close(self) -> None:
        """Stop what reads, and what talks in the background."""
        self.feed.close()
        if self._meets:
            self.meeting.agreement.close()

    def _turn(self, turn: ReplicaTurn) -> Turn:
        """A replica's turn; it ends early if its shard does."""
        replica = self.replicas[turn.index]
        ends = -(-self._shards.size(replica) // self._shards.batch)
        return Turn(replica, turn.start, max(turn.start, min(turn.stop, ends)))
