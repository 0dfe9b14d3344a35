"""A strategy at work: whose turn it is, with which share, and what happens at each sync.

    strategy = make_strategy(config, region, comm=comm, crowd=crowd, deterministic=False, peak_rate=0.1)
    for start, stop in strategy.plan(segments):
        for turn in strategy.turns(start, stop, number=0, whole=stop == steps, asked=asked, rate=rate):
            …steps turn.start to turn.stop of this rank's replica turn.index…

Replicas of a rank take turns on its arena, so R of them on one rank have exactly the arithmetic of R ranks. With groups
(`hierarchical`), those of a group agree among themselves at the end of each piece of a stretch, and all agree at the end of the
stretch; the groups of a rank go through the stretch one after another, so that no more than four slices are needed, however many
replicas and groups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from deepex.comm.base import Communicator, own_zeros
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import AgreedError
from deepex.errors import ConfigError
from deepex.sync.agreement import Agreement, InPlace, SharedArenaMean
from deepex.sync.config import SyncConfig
from deepex.sync.drift import Drift
from deepex.sync.elastic import Elastic
from deepex.sync.outer import Outer, make_outer
from deepex.sync.streaming import Streaming
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import Total, make_total
from deepex.sync.wire import Coded, MakeTotal

Stretch = tuple[int, int]


@dataclass(frozen=True)
class ReplicaTurn:
    """Steps `start` up to `stop` of this rank's replica number `index`; `first`: of those that go through these steps together.

    `resumes`: it goes on with the turn before, of the same replica.
    """

    index: int
    start: int
    stop: int
    first: bool
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplicaSet:
    """All replicas of a job: `samples` tells how many samples a replica sees from one step up to another."""

    replicas: int
    samples: Callable[[int, int, int], int]
    total: Callable[[int, int], int]

    def share(self, replica: int, start: int, stop: int) -> float:
        """A replica's part of all samples of these steps."""
        return self.samples(replica, start, stop) / self.total(start, stop)


@dataclass(frozen=True, kw_only=True)
class GroupLevel:
    """The level below the whole: groups of `size` replicas that agree among themselves, every so many segments all do."""

    agreement: Agreement
    comm: Communicator
    size: int
    between: int


class Strategy:
    """Runs the turns of this rank's replicas, the first of which is `first` among all."""

    def __init__(
        self, agreement: Agreement, comm: Communicator, crowd: ReplicaSet, drift: Drift | None, near: GroupLevel | None
    ) -> None:
        self.agreement, self._comm, self._crowd, self.drift, self._near = agreement, comm, crowd, drift, near
        self._per_rank = crowd.replicas // comm.size
        self._first = comm.rank * self._per_rank
        self._pieces: dict[int, list[Stretch]] = {}
        self._lost = False  # the replica on the arena
        if drift is not None:
            agreement.met = drift.met

    def release(self) -> None:
        """Free the communicators of its own. Collective: not where a rank fails."""
        if self._near is not None:
            self._near.comm.close()

    def plan(self, stretches: Sequence[Stretch]) -> list[Stretch]:
        """The stretches between syncs of all replicas, from the segments that a period rule cuts."""
        size = self._near.between if self._near else 1
        chunks = [list(stretches[k : k + size]) for k in range(0, len(stretches), size)]
        self._pieces = {chunk[0][0]: chunk for chunk in chunks}
        return [(chunk[0][0], chunk[-1][1]) for chunk in chunks]

    def order(self, start: int, stop: int) -> Iterator[ReplicaTurn]:
        """The turns of a stretch, in their order."""
        for group in self._groups():
            for a, b in self._pieces_of(start, stop):
                for index in group:
                    yield from self._parts(group, index, a, b)

    def turns(
        self, start: int, stop: int, *, number: int, whole: bool, asked: Callable[[], float], rate: Callable[[], float]
    ) -> Iterator[ReplicaTurn]:
        """Yield each turn when it is to be run, and sync when all have been."""
        steps = min(b - a for a, b in self._pieces_of(start, stop))
        self.agreement.watch(steps)
        if self._near is not None:
            self._near.agreement.watch(steps)
        self.agreement.prepare(number, whole=whole)
        for group in self._groups():
            if self._near is None:
                yield from self._turns_alone(group, start, stop, rate)
            else:
                yield from self._turns_near(self._near, group, start, stop, rate)
        self.agreement.reach(self._comm, request=asked(), rate=rate())

    @property
    def leaves_out(self) -> bool:
        """Whether `lose` may be called in this stretch."""
        return self.agreement.leaves_out

    def lose(self) -> None:
        """Leave out the replica whose turn it is, which has gone astray, of what is agreed on after this turn."""
        self.agreement.lose()
        self._lost = True

    def _turns_alone(self, group: range, start: int, stop: int, rate: Callable[[], float]) -> Iterator[ReplicaTurn]:
        since = 0 if self.agreement.since_epoch else start
        for index in group:
            share = self._crowd.share(self._first + index, since, stop)
            self.agreement.begin(index)
            self.agreement.expect(share)
            for number, turn in enumerate(self._parts(group, index, start, stop)):
                yield turn
                if number == 0:
                    self.agreement.pause(index)
            self._add(index, share, rate())

    def _parts(self, group: range, index: int, start: int, stop: int) -> list[ReplicaTurn]:
        """A replica's turn, in two if it is interrupted."""
        first, pause = index == group[0], self.agreement.pauses(start, stop)
        if pause is None or pause == stop:
            return [ReplicaTurn(index, start, stop, first)]
        return [ReplicaTurn(index, start, pause, first), ReplicaTurn(index, pause, stop, first, resumes=True)]

    def _turns_near(
        self, near: GroupLevel, group: range, start: int, stop: int, rate: Callable[[], float]
    ) -> Iterator[ReplicaTurn]:
        self.agreement.begin(group[0])
        near.agreement.start()
        members = self._members(near, group)
        for a, b in self._pieces_of(start, stop):
            seen = sum(self._crowd.samples(replica, a, b) for replica in members)
            for index in group:
                near.agreement.begin(index)
                yield ReplicaTurn(index, a, b, index == group[0])
                share = self._crowd.samples(self._first + index, a, b) / seen if seen else 1 / len(members)
                if b < stop:
                    near.agreement.add(index, share)
                    self._lost = False
                else:
                    all_seen = sum(self._crowd.samples(replica, start, stop) for replica in members)
                    self._add(index, share * all_seen / self._crowd.total(start, stop), rate())
            if b < stop:
                near.agreement.reach(near.comm, request=0.0, rate=0.0)

    def _add(self, index: int, share: float, rate: float) -> None:
        self.agreement.add(index, share, rate)
        if self.drift is not None:
            self.drift.miss(index) if self._lost else self.drift.note(index)
        self._lost = False

    def _pieces_of(self, start: int, stop: int) -> list[Stretch]:
        return self._pieces[start] if self._near is not None else [(start, stop)]

    def _groups(self) -> list[range]:
        size = min(self._near.size, self._per_rank) if self._near is not None else self._per_rank
        return [range(k, k + size) for k in range(0, self._per_rank, size)]

    def _members(self, near: GroupLevel, group: range) -> range:
        """All replicas of the group, those of other ranks too."""
        first = (self._first + group[0]) // near.size * near.size
        return range(first, first + near.size)


def make_strategy(
    config: SyncConfig,
    synced: SyncedSlice,
    *,
    comm: Communicator,
    crowd: ReplicaSet,
    deterministic: bool,
    peak_rate: float,
    drift: Drift | None = None,
) -> Strategy:
    """Build what `config` says, for replicas whose learning rate is at most `peak_rate`.

    Collective where it needs communicators of its own.
    """
    per_rank = crowd.replicas // comm.size
    fixed = deterministic and crowd.replicas > 1
    make = partial(make_total, deterministic=fixed, zeros=comm.zeros)
    near = None
    if config.strategy == "hierarchical" and crowd.replicas > 1:
        near = _make_near(config, synced, comm, per_rank, make, fixed=fixed)
    agreement = _make_agreement(config, synced, comm, crowd.replicas, make, fixed=fixed)
    if config.outer != "none" and crowd.replicas > 1:
        rate, momentum = config.outer_step
        agreement = Outer(agreement, make_outer(config.outer, synced, rate=rate, momentum=momentum, peak=peak_rate))
    return Strategy(agreement, comm, crowd, drift, near)


def _make_agreement(
    config: SyncConfig, synced: SyncedSlice, comm: Communicator, replicas: int, make: MakeTotal, *, fixed: bool
) -> Agreement:
    per_rank = replicas // comm.size
    if replicas == 1:
        return InPlace(synced)
    if config.wire != "fp32":
        return Coded(synced, config.wire, make, replicas_per_rank=per_rank, ranks=comm.size)
    if config.overlaps:
        return _make_overlapping(config, synced, comm, per_rank, make, fixed=fixed)
    if config.strategy == "elastic":
        total = make(synced.agreed)
        return Elastic(synced, total, replicas_per_rank=per_rank, replicas=replicas, elasticity=config.elasticity)
    if config.strategy == "streaming":
        return Streaming(synced, make(synced.agreed), replicas_per_rank=per_rank, parts=config.parts)
    return _make_mean(synced, per_rank, make, fixed=fixed)


def _make_overlapping(
    config: SyncConfig, synced: SyncedSlice, comm: Communicator, per_rank: int, make: MakeTotal, *, fixed: bool
) -> Agreement:
    """What communicates in the background; loads threads and queues only then."""
    from deepex.comm.background import Background
    from deepex.sync.delayed import Delayed
    from deepex.sync.overlapped import Overlapped

    if config.strategy == "gradients":
        if per_rank > 1 or fixed or not synced.slots:  # turns, sums of another type, or nobody who tells when a gradient is there
            return _make_mean(synced, per_rank, make, fixed=fixed)
        return Overlapped(synced, synced.slots, chunks=config.chunks, worker=Background(comm))
    total: Total = make_total(synced.agreed, deterministic=fixed, zeros=own_zeros)
    worker, pull = Background(comm), config.pull
    return Delayed(synced, total, replicas_per_rank=per_rank, worker=worker, pull=pull, delay=config.delay, parts=config.parts)


def _make_mean(synced: SyncedSlice, per_rank: int, make: MakeTotal, *, fixed: bool) -> Agreement:
    return InPlace(synced) if per_rank == 1 and not fixed else SharedArenaMean(synced, make(synced.agreed))


def _make_near(
    config: SyncConfig, synced: SyncedSlice, comm: Communicator, per_rank: int, make: MakeTotal, *, fixed: bool
) -> GroupLevel:
    size = config.group or per_rank * comm.place.local_size
    replicas = per_rank * comm.size
    sizes = sorted(set(comm.gather(size)))
    try:
        check_groups(sizes, replicas, per_rank)
    except ConfigError as error:  # every rank finds the same
        raise AgreedError(error) from error
    spans = size > per_rank
    agreement = _make_mean(synced, min(size, per_rank), make, fixed=fixed)
    near = comm.split(comm.rank * per_rank // size) if spans else SoloCommunicator()
    return GroupLevel(agreement=agreement, comm=near, size=size, between=config.between)


def check_groups(sizes: Sequence[int], replicas: int, per_rank: int) -> None:
    """Refuse groups, of these sizes, into which the replicas cannot be split."""
    size = sizes[0]
    if len(sizes) > 1 or replicas % size or (size % per_rank and per_rank % size):
        raise ConfigError(
            f"sync.group is {' and '.join(map(str, sizes))}, but there are {replicas} replicas, {per_rank} on each rank: groups "
            "must be of equal size (those of a node, if 0), and a group must be of whole ranks or a rank of whole groups; set "
            "sync.group to a number that is"
        )
