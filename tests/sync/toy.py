"""A problem small enough to follow: each replica descends its own quadratic, on an arena of a few hundred numbers.

`train` runs it through the product's strategies, `reference` through R full copies in float64 that share nothing, in the plainest
way there is. Both take the same steps on the same samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepex.arena.optimiser.base import MomentumAhead
from deepex.comm.base import Communicator
from deepex.comm.solo import SoloCommunicator
from deepex.data.feeds.shard import Shards
from deepex.sync.config import SyncConfig
from deepex.sync.drift import Drift
from deepex.sync.meeting import ReplicaSet, make_meeting
from deepex.sync.outer import outer_steps
from deepex.sync.states import make_states
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice
from deepex.sync.when.rule import stretches

BUFFERS, WEIGHTS = 16, 600  # of the buffers, the first two are for requests to stop and for lost replicas
MATRICES = MatrixSlot(0, 20, 10), MatrixSlot(200, 12, 25)  # one is tall; 100 weights are of neither
_B, _W, _M = slice(2, BUFFERS), slice(BUFFERS, BUFFERS + WEIGHTS), slice(BUFFERS + WEIGHTS, None)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`count` samples, split over the replicas; `noise` is how far a step's target is from the replica's own.

    `losses`: replica, epoch and step at which its weights are no numbers any more.
    """

    replicas: int
    count: int = 100
    batch: int = 4
    epochs: int = 2
    seed: int = 1
    noise: float = 1.0
    rate: float = 0.05
    decays: bool = False
    losses: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def shards(self) -> Shards:
        return Shards(self.count, self.replicas, self.batch)

    def initial(self) -> torch.Tensor:
        """Buffers, weights, momentum."""
        state = torch.zeros(BUFFERS + 2 * WEIGHTS)
        state[_W] = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(self.seed))
        state[_B] = 1.0
        return state

    def target(self, replica: int) -> torch.Tensor:
        return torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(1000 * self.seed + replica), dtype=torch.float64)

    def curvature(self) -> torch.Tensor:
        return torch.linspace(0.5, 2.0, WEIGHTS, dtype=torch.float64)

    def optimum(self) -> torch.Tensor:
        """Where the mean of all replicas' quadratics is least, weighted by samples."""
        sizes = [self.shards.size(r) for r in range(self.replicas)]
        return sum(size * self.target(r) for r, size in enumerate(sizes)) / self.count  # type: ignore[return-value]

    def step_rate(self, epoch: int) -> float:
        return self.rate / (1 + max(0, epoch - self.epochs // 2)) if self.decays else self.rate

    def step(self, state: torch.Tensor, replica: int, epoch: int, step: int) -> None:
        """One step on a state, in its own precision; nothing if the replica's shard has ended."""
        if not self.shards.samples(replica, step, step + 1):
            return
        generator = torch.Generator().manual_seed(hash((self.seed, replica, epoch, step)) % 2**31)
        target = self.target(replica) + self.noise * torch.randn(WEIGHTS, generator=generator, dtype=torch.float64)
        state[_M].mul_(0.5).add_(self.curvature().to(state.dtype) * (state[_W] - target.to(state.dtype)))
        state[_W].sub_(state[_M], alpha=self.step_rate(epoch))
        if (replica, epoch, step) in self.losses:
            state[_W] = torch.nan
        state[_B].mul_(0.9).add_(state[_W][: BUFFERS - _B.start].square(), alpha=0.1)


def train(
    problem: Problem,
    config: SyncConfig,
    comm: Communicator | None = None,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[float]]:
    """The state that is agreed on after the last epoch, and the drift of each epoch."""
    comm = comm or SoloCommunicator()
    per_rank, shards = problem.replicas // comm.size, problem.shards
    memory = comm.zeros(BUFFERS + 2 * WEIGHTS, dtype, torch.device("cpu"))
    memory.copy_(problem.initial())
    agreed = memory if config.momentum == "average" else memory[: BUFFERS + WEIGHTS]
    held, own = slice(0, BUFFERS), slice(0, len(agreed))
    momentum_ahead = MomentumAhead(memory[_M], 0.5, 0.5, "momentum") if config.momentum != "reset" else None
    synced = SyncedSlice(
        agreed=agreed, buffers=held, weights=_W, own=own, request=0, lost=1, matrices=MATRICES, momentum_ahead=momentum_ahead
    )
    states = make_states({"momentum": config.momentum}, {"momentum": memory[_M]}, replicas_per_rank=per_rank)
    replicas = ReplicaSet(replicas=problem.replicas, samples=shards.samples, total=shards.total_samples)
    drift = Drift(synced, [("all", 0, WEIGHTS)], replicas_per_rank=per_rank)
    meeting = make_meeting(
        config, synced, comm=comm, replicas=replicas, deterministic=deterministic, peak_rate=problem.rate, drift=drift
    )
    meeting.agreement.start()
    drifts = []
    for epoch in range(problem.epochs):
        rate = problem.step_rate(epoch)
        plan = meeting.plan(stretches(config.rule(), 0, shards.steps))
        for number, (start, stop) in enumerate(plan):
            meeting.open(start, stop, number=number, all_parts=stop == shards.steps)
            for some in meeting.rounds(start, stop):
                for turn in some.turns:
                    meeting.begin(turn)
                    if not turn.resumes:
                        states.begin(turn.index)
                    for step in range(turn.start, turn.stop):
                        problem.step(memory, comm.rank * per_rank + turn.index, epoch, step)
                    if meeting.leaves_out and not memory[_W].isfinite().all():
                        memory[_M] = 0
                        meeting.lose()
                    states.end(turn.index)
                    meeting.end(turn, rate)
                meeting.reach(some, request=0.0, rate=rate)
        drifts.append(float(torch.tensor(comm.gather(drift.read())).mean(0)[0]) ** 0.5)
        drift.reset()
    meeting.agreement.settle()  # momentum may still be under way, and what is closed before it is done may stay with a rank
    meeting.agreement.close()
    return memory[: BUFFERS + WEIGHTS].clone(), drifts


def reference(problem: Problem, config: SyncConfig) -> tuple[torch.Tensor, list[float]]:
    """The same by R copies in float64."""
    crowd = Copies(problem, config)
    for epoch in range(problem.epochs):
        crowd.distances = []
        plan = stretches(config.rule(), 0, problem.shards.steps)
        size = config.between if config.strategy == "hierarchical" else 1
        chunks = [plan[k : k + size] for k in range(0, len(plan), size)]
        for number, pieces in enumerate(chunks):
            crowd.stretch(epoch, number, pieces, all_parts=number == len(chunks) - 1)
        crowd.drifts.append((sum(crowd.distances) / max(len(crowd.distances), 1)) ** 0.5)
    return crowd.result()[: BUFFERS + WEIGHTS], crowd.drifts


class Copies:
    """R states, and the definition of each strategy."""

    def __init__(self, problem: Problem, config: SyncConfig) -> None:
        self.problem, self.config, self.replicas = problem, config, problem.replicas
        self.states = [problem.initial().double() for _ in range(problem.replicas)]
        self.centre = problem.initial().double()
        self.velocity, self.squares = (torch.zeros(WEIGHTS, dtype=torch.float64) for _ in range(2))
        self.count = 0
        self.errors = [torch.zeros_like(self.centre) for _ in range(problem.replicas)]
        self.error = torch.zeros_like(self.centre)
        self.copies: list[torch.Tensor] | None = None
        self.late: torch.Tensor | None = None
        self.distances: list[float] = []
        self.drifts: list[float] = []

    def result(self) -> torch.Tensor:
        return self.centre if self.config.strategy == "elastic" and self.replicas > 1 else self.states[0]

    def stretch(self, epoch: int, number: int, pieces: list[tuple[int, int]], *, all_parts: bool) -> None:
        start, stop = pieces[0][0], pieces[-1][1]
        for a, b in pieces:
            for replica, state in enumerate(self.states):
                if self.config.momentum == "reset":
                    state[_M] = 0
                for step in range(a, b):
                    self.problem.step(state, replica, epoch, step)
                    if self.late is not None and self.copies is not None and step + 1 == self.arrival(a, b):
                        state[_W] += self.config.pull * (self.late - self.copies[replica])[_W]  # zero but in the part that came
                if not state[_W].isfinite().all():
                    state[_M] = 0
            if b < stop:
                self.agree_in_groups(a, b)
        self.agree(epoch, number, start, pieces[-1], all_parts=all_parts)

    def arrival(self, start: int, stop: int) -> int:
        """After so many steps, all of them if not said otherwise, the mean of the period before is taken over."""
        return min(start + (self.config.delay or stop - start), stop)

    def samples(self, replica: int, start: int, stop: int) -> int:
        return self.problem.shards.samples(replica, start, stop)

    def shares(self, start: int, stop: int, among: range | None = None) -> list[float]:
        among = range(self.replicas) if among is None else among
        seen = [self.samples(replica, start, stop) for replica in among]
        return [count / sum(seen) for count in seen] if sum(seen) else [1 / len(among)] * len(among)

    @property
    def part(self) -> slice:
        """What is agreed on: momentum too, or not."""
        return slice(0, None) if self.config.momentum == "average" else slice(0, BUFFERS + WEIGHTS)

    def mean(self, shares: list[float], among: range | None = None) -> torch.Tensor:
        among = range(self.replicas) if among is None else among
        left = [(share, self.states[r]) for r, share in zip(among, shares, strict=True) if self.states[r][_W].isfinite().all()]
        if not left:
            return torch.full_like(self.centre, torch.nan)
        return sum(share * state for share, state in left) / sum(share for share, _ in left)

    def groups(self) -> list[range]:
        size = self.config.group
        return [range(k, k + size) for k in range(0, self.replicas, size)]

    def agree_in_groups(self, start: int, stop: int) -> None:
        for group in self.groups():
            mean = self.mean(self.shares(start, stop, group), group)
            for replica in group:
                self.states[replica][self.part] = mean[self.part]

    def meet(self, mean: torch.Tensor, states: list[torch.Tensor]) -> None:
        apart = [float((state[_W] - mean[_W]).square().sum()) for state in states if state[_W].isfinite().all()]
        self.distances.append(sum(apart) / self.replicas if mean[_W].isfinite().all() else torch.nan)

    def agree(self, epoch: int, number: int, start: int, last: tuple[int, int], *, all_parts: bool) -> None:
        if self.replicas == 1:
            self.meet(self.states[0], self.states)
            return
        way: dict[str, Callable[[], None]] = {
            "weights": lambda: self.plain(epoch, self.mean(self.shares(start, last[1]))),
            "hierarchical": lambda: self.plain(epoch, self.hierarchical_mean(start, last)),
            "elastic": lambda: self.elastic(last[1]),
            "streaming": lambda: self.streaming(number, last[1], all_parts=all_parts),
            "background": lambda: self.background(epoch, number, last, all_parts=all_parts),
        }
        if self.config.wire == "fp32":
            way[self.config.strategy]()
        else:
            self.coded(self.shares(start, last[1]))

    def hierarchical_mean(self, start: int, last: tuple[int, int]) -> torch.Tensor:
        total = sum(self.samples(r, start, last[1]) for r in range(self.replicas))
        shares = list[float]()
        for group in self.groups():
            all_parts = sum(self.samples(r, start, last[1]) for r in group) / total
            shares += [all_parts * share for share in self.shares(*last, group)]
        return self.mean(shares)

    def plain(self, epoch: int, mean: torch.Tensor) -> None:
        self.meet(mean, self.states)
        usual = outer_steps()[self.config.outer].usual if self.config.outer != "none" else (1.0, 0.0)
        rate, momentum = self.config.outer_rate or usual[0], self.config.outer_momentum or usual[1]
        change, gamma = self.centre[_W] - mean[_W], self.problem.step_rate(epoch)
        length = rate * gamma / self.problem.rate
        if self.config.outer == "nesterov":
            self.velocity = momentum * self.velocity + change
            mean[_W] = self.centre[_W] - rate * (change + momentum * self.velocity)
        elif self.config.outer == "slowmo":
            self.velocity = momentum * self.velocity + change / gamma
            mean[_W] = self.centre[_W] - rate * gamma * self.velocity
        elif self.config.outer == "adam":
            self.count += 1
            self.velocity = momentum * self.velocity + (1 - momentum) * change
            self.squares = 0.99 * self.squares + 0.01 * change**2
            size = (self.squares / (1 - 0.99**self.count)).sqrt() + 1e-8
            mean[_W] = self.centre[_W] - length * self.velocity / (1 - momentum**self.count) / size
        elif self.config.outer in ("trust", "muon"):
            self.velocity = momentum * self.velocity + change
            ahead = change + momentum * self.velocity
            new = self.centre[_W] - ahead
            for place in MATRICES:
                old, along = (self.matrix(place, values) for values in (self.centre[_W], ahead))
                direction = self.nearly_orthogonal(along) if self.config.outer == "muon" else along
                moved = old - length * self.matrix(place, self.problem.initial().double()[_W]).norm() / direction.norm() * direction
                new[place.offset : place.offset + moved.numel()] = moved.flatten()
            mean[_W] = new
        self.centre = mean.clone()
        for state in self.states:
            state[self.part] = mean[self.part]

    @staticmethod
    def matrix(place: MatrixSlot, values: torch.Tensor) -> torch.Tensor:
        return values[place.offset : place.offset + place.rows * place.columns].reshape(place.rows, place.columns).clone()

    @staticmethod
    def nearly_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
        """By its singular values: five times s ← 3.4445 s − 4.775 s³ + 2.0315 s⁵."""
        if not matrix.isfinite().all():
            return matrix
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        return u @ torch.diag(s) @ v

    def elastic(self, stop: int) -> None:
        mean, beta = self.mean(self.shares(0, stop)), self.config.elasticity
        self.meet(mean, self.states)
        for state in self.states:
            state[self.part] -= beta / self.replicas * (state[self.part] - self.centre[self.part])
        self.centre[self.part] += beta * (mean[self.part] - self.centre[self.part])

    def turn(self, number: int, count: int) -> slice:
        """The part of so many numbers whose turn it is."""
        k, parts = number % self.config.parts, self.config.parts
        return slice(k * count // parts, (k + 1) * count // parts)

    def streaming(self, number: int, stop: int, *, all_parts: bool) -> None:
        mean = self.mean(self.shares(0, stop))
        count = len(self.states[0][self.part])
        chosen = slice(0, count) if all_parts else self.turn(number, count)
        if all_parts:
            self.meet(mean, self.states)
        for state in self.states:
            state[chosen] = mean[chosen]

    def background(self, epoch: int, number: int, last: tuple[int, int], *, all_parts: bool) -> None:
        shares = self.shares(0, last[1])
        if all_parts:
            mean = self.mean(shares)
            self.meet(mean, self.states)
            self.late = self.copies = None
            for state in self.states:
                state[self.part] = mean[self.part]
            return
        chosen = self.turn(number, BUFFERS + WEIGHTS)
        self.copies = [torch.zeros_like(state) for state in self.states]
        for copy, state in zip(self.copies, self.states, strict=True):
            ahead = state.clone()
            if self.config.momentum != "reset":  # steps without gradients, of half the length
                for _ in range(self.arrival(*last) - last[0]):
                    ahead[_M] *= 0.5
                    ahead[_W] -= self.problem.step_rate(epoch) * ahead[_M] / 2
            copy[chosen] = ahead[chosen]
        self.late = sum(share * copy for share, copy in zip(shares, self.copies, strict=True))

    def coded(self, shares: list[float]) -> None:
        mean, total = self.mean(shares), torch.zeros_like(self.centre)
        self.meet(mean, self.states)
        for replica, share in enumerate(shares):
            change = share * (self.states[replica] - self.centre) + self.errors[replica]
            sent = self.rounded(change)
            self.errors[replica] = change - sent
            total += sent
        summed = self.rounded(total + self.error)
        self.error = total + self.error - summed
        mean[BUFFERS:] = (self.centre + summed)[BUFFERS:]
        self.centre = mean.clone()
        for state in self.states:
            state[self.part] = mean[self.part]

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What bf16, or int8 with a scale for each 256 numbers, can hold of the changes of weights and momentum."""
        result = values.clone()
        end = len(values[self.part])
        if self.config.wire == "bf16":
            result[BUFFERS:end] = values[BUFFERS:end].float().bfloat16().double()
            return result
        for low in range(BUFFERS, end, 256):
            block = values[low : min(low + 256, end)]
            scale = block.abs().max() / 127
            result[low : low + len(block)] = (block / scale).round() * scale if scale > 0 else block
        return result
