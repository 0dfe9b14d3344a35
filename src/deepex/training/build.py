"""From a job to all that it takes to run it, on every rank.

    parts = build(job, comm)                        # a new run
    parts = build(job, comm, resuming=True)         # what a checkpoint is read into

`build` reads as a list. A line that is marked talks to the other ranks; no other does, and nothing does so on the side. Until it is
done there is no run directory, so that of a run that cannot begin nothing is left.
"""

from contextlib import ExitStack
from functools import partial

from deepex.arena.arena import Arena
from deepex.arena.counters import Counters
from deepex.arena.mode import begin_training
from deepex.arena.optimiser import make_optimiser
from deepex.arena.schedule import Schedule
from deepex.comm import Communicator
from deepex.comm.together import together
from deepex.data.feeds.placement import make_feed
from deepex.data.feeds.samples import Samples
from deepex.data.prepare import Prepare
from deepex.record.clock import PhaseClock
from deepex.step.choose import make_eager, make_runner
from deepex.step.eager import EagerStep
from deepex.step.runner import Runner, StepInputs
from deepex.sync.meeting import ReplicaSet, make_meeting
from deepex.sync.states import make_states
from deepex.task import make_task
from deepex.training.batch_norm import Statistics
from deepex.training.evaluate import Evaluator
from deepex.training.guard import NetworkGuard
from deepex.training.job import Job
from deepex.training.parts import Parts
from deepex.training.sync_trial import SyncTrial, wants_trial
from deepex.training.synced import make_drift, synced_slice

RunnerMade = tuple[Runner, PhaseClock, dict[str, list[dict[str, str]]]]


def build(job: Job, comm: Communicator, *, resuming: bool = False, clock: PhaseClock | None = None) -> Parts:
    """Make the parts of a job. `clock` replaces the phase clock, for the benchmark of what measuring costs. Collective."""
    config, shards, replicas = job.config, job.shards, job.replicas
    per_rank = replicas // comm.size
    mine = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    updates = not config.sync.kind.sums_gradients
    gathers = job.device.type != "cpu" or not updates
    schedule = Schedule(config.optim, epochs=config.epochs, total_batch=config.batch * replicas)
    rate, rule = schedule.during(shards.steps), config.sync.rule()
    network, task, policies = begin_training(job.network), make_task(config.task), config.state_policies
    given = job.dataset.manifest.order == "given"
    samples = Samples(job.dataset.part("train"), shards, mine, seed=config.seed, shuffled=not given)
    prepare = Prepare(
        job.dataset.manifest,
        job.device,
        standardise=task.standardise,
        channels_last=job.channels_last,
        augment=config.augment,
    )
    with ExitStack() as made:
        arena = Arena(  # collective: ranks of a node may share its memory
            network,
            job.device,
            states=tuple(policies),
            channels_last=job.channels_last,
            gathers=gathers,
            zeros=comm.zeros,
            moving=job.moving,
        )
        optimiser = make_optimiser(config.optim, arena)
        guard = NetworkGuard(network, arena, replicas=replicas)
        step = EagerStep(network, task, arena, prepare, precision=config.precision)
        differ = updates and replicas > 1  # else nothing happens to states
        states = make_states(policies if differ else {}, arena.states, replicas_per_rank=per_rank)
        feed = make_feed(job.placement, samples, job.device, comm=comm, verify=config.verify)  # collective
        made.callback(feed.close)
        inputs = StepInputs(
            options=config.step_options,
            network=network,
            arena=arena,
            task=task,
            prepare=prepare,
            feed=feed,
            samples=samples,
            optimiser=optimiser,
            rate=rate,
            updates=updates,
            turn_steps=rule.longest(shards.steps),
        )
        runner, clock, by_rank = _same_runner(job, comm, inputs, step, clock)  # collective: the same kind on every rank
        statistics = None
        if job.plan.estimates:
            statistics = Statistics(  # collective: it has a sum of its own
                network, arena, step, feed, shards, comm=comm, mine=mine, deterministic=config.deterministic
            )
        evaluator = _make_evaluator(job, comm)
        trial = None
        if not resuming:
            comm.broadcast(arena.kept)  # collective: the initial weights are rank 0's
            if wants_trial(job):
                trial = SyncTrial(job, comm, optimiser, step, runner)  # collective
                job = trial.settle(job)  # collective
                rule = job.config.sync.rule()
        synced = synced_slice(job, optimiser)
        meeting = make_meeting(  # collective: sums, and communicators of its own
            job.config.sync,
            synced,
            comm=comm,
            replicas=ReplicaSet(replicas=replicas, samples=shards.samples, total=shards.total_samples),
            deterministic=config.deterministic,
            peak_rate=schedule.peak,
            drift=make_drift(job, arena, synced, replicas_per_rank=per_rank),
        )
        made.callback(meeting.agreement.close)
        if meeting.agreement.hears is not None:
            arena.listeners.append(meeting.agreement.hears)
        if trial is not None and rule.wants_times:
            rule.measured(trial.steps_for(meeting.agreement.nbytes))  # collective
        if not resuming:
            meeting.agreement.start()
        made.pop_all()
    return Parts(
        job=job,
        comm=comm,
        mine=mine,
        network=network,
        arena=arena,
        guard=guard,
        task=task,
        step=step,
        feed=feed,
        rate=rate,
        runner=runner,
        clock=clock,
        step_by_rank=by_rank,
        counters=Counters(network, per_rank),
        states=states,
        rule=rule,
        meeting=meeting,
        statistics=statistics,
        evaluator=evaluator,
    )


def _same_runner(job: Job, comm: Communicator, inputs: StepInputs, step: EagerStep, clock: PhaseClock | None) -> RunnerMade:
    """The same kind of runner on every rank; what each rank would have taken, where they differ. Collective."""
    steps = job.config.epochs * job.shards.steps * (job.replicas // comm.size)
    runner, used = together(comm, partial(make_runner, inputs, step, steps=steps, begun=job.begun, clock=clock))
    told = comm.gather({"kind": runner.choice.kind, "reason": runner.choice.reason})
    if len({one["kind"] for one in told}) == 1:
        return runner, used, {}
    rank, other = next((rank, one) for rank, one in enumerate(told) if one["kind"] == "eager")
    return *make_eager(inputs, step, clock, f"rank {rank} cannot do else, {other['reason']}"), {"by_rank": told}


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
