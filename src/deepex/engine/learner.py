"""What one rank does between two syncs, and at a sync: its replicas take turns on the arena, then all ranks agree.

    learner.begin_epoch(epoch, step=0)
    for start, stop in learner.plan:
        learner.segment(epoch, start, stop)

Compute phases contain no collective, so a slow rank shows as slow; nothing is read from the device.
"""

from collections.abc import Callable

import torch
from torch import nn

from deepex.comm import Communicator
from deepex.data.feeds.placement import make_feed
from deepex.data.feeds.samples import Samples, Turn
from deepex.data.prepare import Prepare
from deepex.engine.arena import Arena
from deepex.engine.choose import make_runner
from deepex.engine.counters import Counters
from deepex.engine.job import Job
from deepex.engine.objective import make_objective
from deepex.engine.optim import Optimiser
from deepex.engine.rate import Schedule
from deepex.engine.runner import Parts
from deepex.engine.step import EagerStep
from deepex.errors import ConfigError
from deepex.record.clock import SYNC, UPDATE, PhaseClock
from deepex.sync import Agreement, make_agreement, make_momentum, parse_period, segments


class Learner:
    """The replicas of one rank: their shared arena, their feed, their optimiser, and their agreement with the other ranks."""

    def __init__(self, job: Job, comm: Communicator, clock: PhaseClock | None = None) -> None:
        config, manifest = job.config, job.dataset.manifest
        self._job, self._comm = job, comm
        self._shards, self.network = job.shards, job.network.train()
        per_rank = job.replicas // comm.size
        self.replicas = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        _check_network(job.network, job.replicas)
        self._updates_locally = config.sync.strategy == "weights"
        gathers = not self._updates_locally or job.device.type != "cpu"
        self.arena = Arena(job.network, job.device, channels_last=job.channels_last, gathers=gathers, zeros=comm.zeros)
        self.objective = make_objective(config.objective)
        prepare = Prepare(
            manifest,
            job.device,
            standardise=self.objective.standardise,
            channels_last=job.channels_last,
            augment=config.augment,
        )
        self.step = EagerStep(self.network, self.objective, self.arena, prepare, precision=config.precision)
        policy = config.sync.momentum if self._updates_locally and job.replicas > 1 else "average"
        self._counters = Counters(self.network, per_rank)
        self.momentum = make_momentum(policy, self.arena.momentum, replicas_per_rank=per_rank)
        schedule = Schedule(config.optim, epochs=config.epochs, total_batch=config.batch * job.replicas)
        self._rate = schedule.during(self._shards.steps)  # not a method: this object would hold itself alive
        self._rule = parse_period(config.sync.period or ("epoch" if self._updates_locally else 1))
        samples = Samples(
            job.dataset.part("train"),
            self._shards,
            self.replicas,
            seed=config.seed,
            shuffled=manifest.order != "given",
        )
        self.feed = make_feed(job.placement, samples, job.device, comm=comm, verify=config.verify)
        parts = Parts(
            config=config,
            network=self.network,
            arena=self.arena,
            objective=self.objective,
            prepare=prepare,
            feed=self.feed,
            samples=samples,
            optimiser=Optimiser(config.optim, self.arena),
            rate=self._rate,
            updates=self._updates_locally,
            turn_steps=max(stop - start for start, stop in segments(self._rule, 0, self._shards.steps)),
        )
        steps = config.epochs * self._shards.steps * per_rank
        self.runner, self.clock = make_runner(parts, self.step, steps=steps, begun=job.begun, clock=clock)
        self._agreement = self._make_agreement()
        self.plan: list[tuple[int, int]] = []
        self.rate = 0.0

    def start(self) -> None:
        """Begin from the state that the arena holds now: initial weights, or those of a checkpoint."""
        self._agreement.start()

    def _make_agreement(self) -> Agreement:
        arena = self.arena
        if not self._updates_locally:
            agreed, own, request = arena.gradients_and_buffers, arena.buffers, arena.gradients.numel()
        else:
            averaged = self._job.config.sync.momentum == "average"
            agreed, request = arena.model_and_momentum if averaged else arena.model, 0
            own = agreed
        return make_agreement(
            agreed,
            own=own,
            request=request,
            replicas_per_rank=len(self.replicas),
            deterministic=self._job.config.deterministic and self._job.replicas > 1,
            zeros=self._comm.zeros,
        )

    @property
    def sync_bytes(self) -> int:
        """What one sync sends and receives per rank, as the size of the buffer that is summed."""
        return self._agreement.nbytes

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Plan the syncs of an epoch from `step` on, and start its feed."""
        self.clock.reset()
        self.plan = segments(self._rule, step, self._shards.steps)
        turns = [self._turn(replica, *segment) for segment in self.plan for replica in self.replicas]
        self.runner.begin_epoch(epoch, turns)
        self.clock.start()

    def segment(
        self, epoch: int, start: int, stop: int, *, asked_to_stop: Callable[[], bool], stepped: Callable[[int], None]
    ) -> int:
        """Run the steps from `start` up to `stop` on every replica of this rank, then agree.

        Gives the step reached: earlier than `stop` only for a run of one replica that was asked to stop; nobody waits for it.
        """
        alone = self._job.replicas == 1
        total = self._shards.total_samples(start, stop)
        for index, replica in enumerate(self.replicas):
            self._agreement.begin()
            self.momentum.begin(index)
            self._counters.begin(index)
            self.clock.mark(SYNC)
            share = 1.0 if alone else self._shards.samples(replica, start, stop) / total
            done = start
            for steps, samples in self.runner.steps(epoch, self._turn(replica, start, stop)):
                stepped(samples)
                done += steps
                if alone and done < stop and asked_to_stop():
                    stop = done
                    break
            self.rate = self._rate(epoch, stop - 1)
            self.arena.take_back_buffers()
            self.momentum.end(index)
            self._counters.end(index)
            self._agreement.add(share)
            self.clock.mark(SYNC)
        self._counters.agreed()
        self._agreement.reach(self._comm, float(asked_to_stop()))
        self.clock.mark(SYNC)
        if not self._updates_locally:
            self.rate = self._rate(epoch, stop - 1)  # also on a rank whose shards have ended: all update alike
            self.runner.update(self.rate)
            self.clock.mark(UPDATE)
        return stop

    @property
    def requests(self) -> torch.Tensor:
        """Above zero if some rank was asked to stop, as told at the last sync; on the device."""
        return self._agreement.requests

    def _turn(self, replica: int, start: int, stop: int) -> Turn:
        """A replica's turn; it ends early if its shard does."""
        return Turn(replica, start, max(start, min(stop, -(-self._shards.size(replica) // self._shards.batch))))


def _check_network(network: nn.Module, replicas: int) -> None:
    """Refuse what cannot be averaged."""
    for name, module in network.named_modules():
        cumulative = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
        if cumulative and module.track_running_stats and replicas > 1:
            raise ConfigError(
                f"batch norm {name!r} has momentum None (a cumulative average), and the {replicas} replicas' counters cannot be "
                "averaged: give it a momentum, for example 0.1, or use one replica"
            )
