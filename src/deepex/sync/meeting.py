"""Replicas take turns on their rank's arena, and meet.

    meeting = make_meeting(config, synced, comm=comm, replicas=replicas, deterministic=False, peak_rate=0.1)
    for start, stop in meeting.plan(stretches):
        meeting.open(start, stop, number=0, all_parts=stop == steps)
        for some in meeting.rounds(start, stop):
            for turn in some.turns:
                meeting.begin(turn)
                …steps turn.start to turn.stop of this rank's replica turn.index…
                meeting.end(turn, rate)
            meeting.reach(some, request=0.0, rate=rate)     # the collective

R replicas on one rank have exactly the arithmetic of R ranks. With groups, those of a group agree among themselves after each part
of a stretch, and all agree at its end; the groups of a rank go through the stretch one after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from deepex.comm.base import Communicator
from deepex.sync.agreement import Agreement
from deepex.sync.config import SyncConfig
from deepex.sync.drift import Drift
from deepex.sync.how.strategy import AgreementInputs, GroupLevel
from deepex.sync.mean import InPlace
from deepex.sync.outer import make_outer
from deepex.sync.outer.outer import Outer
from deepex.sync.synced_slice import SyncedSlice
from deepex.sync.total import make_total
from deepex.sync.wire import wires
from deepex.sync.wire.coded import Coded

Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ReplicaTurn:
    """Steps `start` up to `stop` of this rank's replica number `index`, which is then contributed with weight `share`.

    `first`: of those that go through these steps together; `opens`: and they are the first of the stretch. `resumes`: it goes on
    with the turn before, of the same replica; `ends`: the stretch, for this replica.
    """

    index: int
    start: int
    stop: int
    share: float
    first: bool
    opens: bool
    resumes: bool = False
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class Round:
    """Turns after which replicas meet: those of a group, all of them, or nobody, as other groups of the rank are still to come."""

    turns: list[ReplicaTurn]
    meets: str


@dataclass(frozen=True, kw_only=True)
class ReplicaSet:
    """All replicas of a job: `samples` tells how many samples a replica sees from one step up to another."""

    replicas: int
    samples: Callable[[int, int, int], int]
    total: Callable[[int, int], int]

    def share(self, replica: int, start: int, stop: int) -> float:
        """A replica's part of all samples of these steps."""
        return self.samples(replica, start, stop) / self.total(start, stop)


class Meeting:
    """Where this rank's replicas agree with all others."""

    def __init__(
        self, agreement: Agreement, comm: Communicator, replicas: ReplicaSet, drift: Drift | None, near: GroupLevel | None
    ) -> None:
        self.agreement, self._comm, self._replicas, self.drift, self._near = agreement, comm, replicas, drift, near
        self._per_rank = replicas.replicas // comm.size
        self._first = comm.rank * self._per_rank
        self._parts: dict[int, list[Stretch]] = {}
        self._lost = False  # the replica on the arena
        if drift is not None:
            agreement.on_mean = drift.on_mean

    def release(self) -> None:
        """Free the communicators of its own. Collective: not where a rank fails."""
        if self._near is not None:
            self._near.comm.close()

    def plan(self, stretches: Sequence[Stretch]) -> list[Stretch]:
        """The stretches between syncs of all replicas, from those that a period rule cuts."""
        size = self._near.between if self._near else 1
        chunks = [list(stretches[k : k + size]) for k in range(0, len(stretches), size)]
        self._parts = {chunk[0][0]: chunk for chunk in chunks}
        return [(chunk[0][0], chunk[-1][1]) for chunk in chunks]

    def open(self, start: int, stop: int, *, number: int, all_parts: bool) -> None:
        """Begin the stretch before sync `number` of the epoch; after one of `all_parts` all replicas are equal."""
        steps = min(b - a for a, b in self._parts_of(start, stop))
        self.agreement.watch(steps)
        if self._near is not None:
            self._near.agreement.watch(steps)
        self.agreement.prepare(number, all_parts=all_parts)

    def rounds(self, start: int, stop: int) -> Iterator[Round]:
        """The turns of a stretch in their order, and where replicas meet between them."""
        groups = self._groups()
        for group in groups:
            for a, b in self._parts_of(start, stop):
                turns = [turn for index in group for turn in self._turns(group, index, (a, b), (start, stop))]
                meets = "group" if b < stop else "all" if group == groups[-1] else "nobody"
                yield Round(turns=turns, meets=meets)

    def begin(self, turn: ReplicaTurn) -> None:
        """Bring to the arena what a turn starts from."""
        if turn.resumes:
            return
        agreement = self.agreement
        if self._near is not None:
            if turn.opens:
                agreement.begin(turn.index)
                self._near.agreement.start()
            agreement = self._near.agreement
        agreement.begin(turn.index)
        agreement.expect(turn.share)

    @property
    def leaves_out(self) -> bool:
        """Whether `lose` may be called in this stretch."""
        return self.agreement.leaves_out

    def lose(self) -> None:
        """Leave out the replica whose turn it is, which has gone astray, of what is agreed on after this turn."""
        self.agreement.lose()
        self._lost = True

    def end(self, turn: ReplicaTurn, rate: float) -> None:
        """Contribute what a turn has come to; `rate` is its last step's."""
        if self._near is not None and not turn.ends:
            self._near.agreement.add(turn.index, turn.share)
            self._lost = False
            return
        if not turn.resumes:
            self.agreement.pause(turn.index)
        if turn.ends:
            self.agreement.add(turn.index, turn.share, rate)
            if self.drift is not None:
                self.drift.miss(turn.index) if self._lost else self.drift.note(turn.index)
            self._lost = False

    def reach(self, some: Round, *, request: float, rate: float) -> None:
        """Meet after a round: the collective, and the only one of a stretch but for those of groups."""
        if some.meets == "group" and self._near is not None:
            self._near.agreement.reach(self._near.comm, request=0.0, rate=0.0)
        elif some.meets == "all":
            self.agreement.reach(self._comm, request=request, rate=rate)

    def _turns(self, group: range, index: int, part: Stretch, stretch: Stretch) -> list[ReplicaTurn]:
        """A replica's turn, in two if it is interrupted."""
        (a, b), (start, stop) = part, stretch
        first = index == group[0]
        opens, share = first and a == start, self._share(group, index, part, stretch)
        pause = None if self._near is not None else self.agreement.pauses(start, stop)
        if pause is None or pause == stop:
            return [ReplicaTurn(index=index, start=a, stop=b, share=share, first=first, opens=opens, ends=b == stop)]
        return [
            ReplicaTurn(index=index, start=start, stop=pause, share=share, first=first, opens=opens, ends=False),
            ReplicaTurn(index=index, start=pause, stop=stop, share=share, first=first, opens=False, resumes=True),
        ]

    def _share(self, group: range, index: int, part: Stretch, stretch: Stretch) -> float:
        """The weight of a replica at the end of a part: among its group, or among all at the end of the stretch."""
        (a, b), (start, stop), replicas, replica = part, stretch, self._replicas, self._first + index
        if self._near is None:
            return replicas.share(replica, 0 if self.agreement.since_epoch else start, stop)
        members = self._members(self._near, group)
        seen = sum(replicas.samples(member, a, b) for member in members)
        share = replicas.samples(replica, a, b) / seen if seen else 1 / len(members)
        if b < stop:
            return share
        return share * sum(replicas.samples(member, start, stop) for member in members) / replicas.total(start, stop)

    def _parts_of(self, start: int, stop: int) -> list[Stretch]:
        return self._parts[start] if self._near is not None else [(start, stop)]

    def _groups(self) -> list[range]:
        size = min(self._near.size, self._per_rank) if self._near is not None else self._per_rank
        return [range(k, k + size) for k in range(0, self._per_rank, size)]

    def _members(self, near: GroupLevel, group: range) -> range:
        """All replicas of the group, those of other ranks too."""
        first = (self._first + group[0]) // near.size * near.size
        return range(first, first + near.size)


def make_meeting(
    config: SyncConfig,
    synced: SyncedSlice,
    *,
    comm: Communicator,
    replicas: ReplicaSet,
    deterministic: bool,
    peak_rate: float,
    drift: Drift | None = None,
) -> Meeting:
    """Build what `config` says, for replicas whose learning rate is at most `peak_rate`.

    Collective where it needs communicators of its own.
    """
    if replicas.replicas == 1:
        return Meeting(InPlace(synced), comm, replicas, drift, None)
    make = partial(make_total, deterministic=deterministic, zeros=comm.zeros)
    inputs = AgreementInputs(synced=synced, comm=comm, replicas=replicas.replicas, make=make, fixed=deterministic)
    near = config.kind.group_level(config, inputs)
    if config.wire != "fp32":
        code = wires()[config.wire]
        agreement: Agreement = Coded(synced, code, make, replicas_per_rank=inputs.per_rank, ranks=comm.size)
    else:
        agreement = config.kind.agree(config, inputs)
    if config.outer != "none":
        step = make_outer(config.outer, synced, rate=config.outer_rate, momentum=config.outer_momentum, peak=peak_rate)
        agreement = Outer(agreement, step)
    return Meeting(agreement, comm, replicas, drift, near)
