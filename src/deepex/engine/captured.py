"""The whole step as one CUDA graph: input, forward, loss, backward and update are launched together, by one call of the host.

    runner = CapturedRunner(parts, clock)      # captures; the arena is left as it was
    for steps, samples in runner.steps(epoch, turn): …

What changes from step to step lies on the device before the epoch begins: a table with each step's first place in the epoch's order,
the key of its random numbers, and its rate; and a cursor, which the last kernel of a step moves on. So a replay needs nothing from
the host, and several steps can be one graph where a step is shorter than a launch takes.
In bf16 the network computes with a bf16 twin of the arena's weights, the `shadow`; it is written by the update, and anew at the
start of each turn, because a sync or another replica may have changed the weights.

Graphs share one pool of memory: they run one after another, and none leaves anything there for another.
"""

import gc
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.samples import Turn
from deepex.engine.fusion import Fused, fuse
from deepex.engine.fusion.parts import Means
from deepex.engine.kernels.loss import loss_and_tally
from deepex.engine.kernels.take import Taker
from deepex.engine.kernels.update import Gradients, finish_kernel, update
from deepex.engine.product import Lane
from deepex.engine.runner import Parts, Runner, StepChoice
from deepex.engine.step import mixed
from deepex.record.clock import BACKWARD, FORWARD, INPUT, UPDATE, PhaseClock

_WARM_UPS: Final = 2
_LAP_SECONDS: Final = 0.002  # a graph is worth at least so much work, or the host could not keep up
_MOST_STEPS: Final = 32  # of one graph
_LEAD_SECONDS: Final = 0.5  # how far the host may be ahead of the device: a request to stop must not wait longer


class _Graph:
    """`steps` steps on batches of `size` samples, captured."""

    def __init__(self, size: int, steps: int) -> None:
        self.size, self.steps = size, steps
        self.graph = torch.cuda.CUDAGraph()
        self.tables: list[Gradients] = []


@final
class CapturedRunner(Runner):
    """Replays captured steps. What it needs is captured when it is built; the state of the arena is put back afterwards."""

    def __init__(self, parts: Parts, clock: PhaseClock) -> None:
        self._parts, self._clock, self._device = parts, clock, parts.arena.memory.device
        self._bf16 = parts.config.precision == "bf16"
        arena = parts.arena
        self._shadow = torch.empty_like(arena.weights, dtype=torch.bfloat16) if self._bf16 else None
        self._leaves = self._make_leaves()
        self._lane = Lane(self._device)
        self._key = torch.zeros(1, dtype=torch.int64, device=self._device)
        means = Means(
            weights=self._weight_of,
            lane=self._lane,
            key=self._key,
            folds=not parts.objective.needs_images,
            tf32=parts.config.precision == "tf32",
        )
        self._fused = fuse(parts.network, means) if parts.config.fuse else Fused(parts.network, Counter(), [])
        self._source = _Source(parts, self._device, fold=self._fused.fold, key=self._key)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._places = torch.zeros((max(self._source.most_steps, _MOST_STEPS), 2), dtype=torch.int64, device=self._device)
        self._rates = torch.zeros(len(self._places), device=self._device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._random = False
        self._pool: Any = None
        began = time.perf_counter()
        self._graphs = self._capture_all()
        lap = self._graphs[0]
        self._lead = max(2, int(_LEAD_SECONDS / max(self._step_seconds * lap.steps, 1e-6)))
        self._pending: deque[Any] = deque()
        self.choice = StepChoice(
            kind="captured",
            reason=f"{lap.steps} step{'s' * (lap.steps > 1)} in one launch; captured in {time.perf_counter() - began:.1f} s",
            fusions=dict(self._fused.found),
        )

    @override
    def begin_epoch(self, epoch: int, turns: Sequence[Turn]) -> None:
        parts = self._parts
        self.sums.zero_()
        parts.feed.begin(epoch, turns)
        begins = self._source.begins(turns)
        steps = [(turn.replica, step) for turn in turns for step in range(turn.start, turn.stop)][: len(begins)]
        keys = [mixed(parts.config.seed, replica, epoch, step) for replica, step in steps]
        rows = np.array([begins, np.array(keys, np.uint64).view(np.int64)], np.int64).T
        rates = np.array([parts.rate(epoch, step) for _, step in steps], np.float32)
        self._places[: len(rows)].copy_(torch.from_numpy(np.ascontiguousarray(rows)))
        self._rates[: len(rates)].copy_(torch.from_numpy(rates))
        self._cursor.zero_()
        self._keys, self._row = keys, 0

    @override
    def steps(self, epoch: int, turn: Turn) -> Iterator[tuple[int, int]]:
        self._cast()
        sizes = self._source.sizes(turn)
        done = 0
        while done < len(sizes):
            graph = next(g for g in self._graphs if g.size == sizes[done] and self._fits(g, sizes, done))
            for _ in range(graph.steps):
                self._source.bring()
            if self._random:
                torch.cuda.default_generators[self._device.index or 0].manual_seed(self._keys[self._row])
            graph.graph.replay()
            self._row += graph.steps
            done += graph.steps
            self._keep_pace()
            yield graph.steps, graph.steps * graph.size

    @override
    def update(self, rate: float) -> None:
        self._parts.optimiser.update(rate)

    def _fits(self, graph: _Graph, sizes: list[int], done: int) -> bool:
        return sizes[done : done + graph.steps] == [graph.size] * graph.steps

    def _keep_pace(self) -> None:
        """Wait, without asking the device to stop, until the host is not too far ahead."""
        event = torch.cuda.Event()
        event.record()
        self._pending.append(event)
        if len(self._pending) > self._lead:
            oldest = self._pending.popleft()
            while not oldest.query():
                time.sleep(0.0005)

    # --- capture

    def _capture_all(self) -> list[_Graph]:
        """Graphs for every size of batch there is; the full one first, also with several steps if one is short."""
        kept = self._kept_state()
        try:
            self._stream = torch.cuda.Stream(self._device)
            full, *rest = self._source.all_sizes
            one = self._capture(full, 1)
            self._step_seconds = self._time(one)
            graphs = [one]
            steps = min(_MOST_STEPS, int(_LAP_SECONDS / self._step_seconds))
            if steps > 1 and not self._random and self._parts.updates and self._source.resident:
                graphs.insert(0, self._capture(full, steps))
            return [*graphs, *(self._capture(size, 1) for size in rest)]
        finally:
            self._put_back(kept)

    def _capture(self, size: int, steps: int) -> _Graph:
        found = _Graph(size, steps)
        tables = [self._make_table() for _ in range(steps)]
        generator = torch.cuda.default_generators[self._device.index or 0]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                self._cursor.zero_()
                before = generator.get_offset()
                self._step(size, tables[0], capturing=False)
                self._random = self._random or generator.get_offset() != before
            self._cursor.zero_()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        # Not "global": a thread may be bringing samples to the device meanwhile.
        with torch.cuda.graph(found.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            for table in tables:
                self._step(size, table, capturing=True)
        self._pool = found.graph.pool()
        for table in tables:
            table.send()
        found.tables = tables
        return found

    def _step(self, size: int, table: Gradients, *, capturing: bool) -> None:
        parts, clock = self._parts, self._clock
        images, labels = self._source.take(self._places, self._cursor, size)
        clock.mark(INPUT)
        for leaf in self._leaves:
            leaf.grad = None
        self._lane.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            output = self._fused(images)
        loss, tally = loss_and_tally(parts.objective, output, images, labels)
        if self._fused.counters:
            torch._foreach_add_(self._fused.counters, 1)
        clock.mark(FORWARD)
        loss.backward()
        self._lane.join()
        gradients = [_dense(leaf, self._lane.gradient(leaf)) for leaf in self._leaves]
        table.point(gradients)
        if not capturing:
            table.send()
        if not parts.updates or parts.config.optim.method == "lars":
            table.gather(parts.arena.gradients)
        clock.mark(BACKWARD)
        if parts.updates:
            self._update(table)
        finish_kernel[(1,)](self.sums, loss.detach(), tally, self._cursor, float(size), num_warps=1)
        if parts.updates:
            clock.mark(UPDATE)

    def _update(self, table: Gradients) -> None:
        parts, optim = self._parts, self._parts.config.optim
        if optim.method == "lars":
            parts.optimiser.adapt(parts.arena.gradient_tensors())
            table = self._gathered
        update(
            *(table, parts.arena, self._shadow, self._rates, self._cursor),
            momentum=optim.momentum,
            decay=optim.weight_decay if optim.method == "sgd" else 0.0,
            nesterov=optim.nesterov,
        )

    def _make_table(self) -> Gradients:
        optim, arena = self._parts.config.optim, self._parts.arena
        if optim.method == "lars":
            self._gathered = Gradients(arena, decays=False)
            self._gathered.point(arena.gradient_tensors())
            self._gathered.send()
        return Gradients(arena, decays=optim.weight_decay > 0 and optim.method == "sgd")

    def _time(self, graph: _Graph) -> float:
        """Seconds of a step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cursor.zero_()
        graph.graph.replay()
        start.record()
        for _ in range(_WARM_UPS):
            graph.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / _WARM_UPS

    # --- state

    def _make_leaves(self) -> list[torch.Tensor]:
        """What gradients are taken of, for each slot of the weights: the parameter, until its twin is asked for."""
        arena = self._parts.arena
        self._slots = {id(parameter): number for number, parameter in enumerate(arena.trainable)}
        return list(arena.trainable)

    def _weight_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor to compute with in place of `parameter`: its bf16 twin, which then gets the gradient."""
        if self._shadow is None:
            return parameter
        if id(parameter) not in self._slots:  # frozen: it does not change
            return parameter.detach().to(torch.bfloat16)
        number = self._slots[id(parameter)]
        if self._leaves[number] is parameter:
            twin = self._parts.arena.layout.weights[number].view(self._shadow)
            self._leaves[number] = twin.requires_grad_()
        return self._leaves[number]

    def _cast(self) -> None:
        if self._shadow is not None:
            self._shadow.copy_(self._parts.arena.weights)

    def _kept_state(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._cast()
        held = [self._parts.arena.memory, *(b for b in self._parts.network.buffers() if not b.is_floating_point())]
        return [(tensor, tensor.clone()) for tensor in held]

    def _put_back(self, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, value in kept:
            tensor.copy_(value)
        self._cast()
        self.sums.zero_()
        self._clock.reset()


def _dense(leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A leaf's gradient, in the order of the leaf's own memory."""
    if gradient is None:
        return torch.zeros_like(leaf)
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    if all(a == b for size, a, b in strides if size > 1):
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


@final
class _Source:
    """Where a step's samples come from: all of them on the device, or one batch that a feed has brought there."""

    def __init__(self, parts: Parts, device: torch.device, *, fold: tuple[int, int, int], key: torch.Tensor) -> None:
        self._feed, self._samples, shards = parts.feed, parts.samples, parts.samples.shards
        self.resident = isinstance(parts.feed, DeviceFeed)
        if isinstance(parts.feed, DeviceFeed):
            images, labels, order = parts.feed.images, parts.feed.labels, parts.feed.order
        else:
            images, labels = (torch.from_numpy(array).to(device) for array in parts.samples.empty(shards.batch))
            labels.zero_()
            order = torch.arange(shards.batch, device=device)
        prepare = parts.prepare
        self._taker = Taker(
            images=images, labels=labels, order=order, factor=prepare.factor.flatten(), offset=prepare.offset.flatten(),
            size=prepare.augment.size, pad=prepare.augment.config.pad, flip=prepare.augment.config.flip, fold=fold[0], border=fold[1], kernel=fold[2], key=key,
        )  # fmt: skip
        exact = parts.config.precision != "bf16" or parts.objective.needs_images
        self._dtype = torch.float32 if exact else torch.bfloat16
        counts = {self._count(replica) for replica in parts.samples.replicas}
        rests = {count % shards.batch for count in counts} - {0}
        fulls = {min(count, shards.batch) for count in counts}
        self.all_sizes = sorted(fulls | rests, reverse=True)
        self.most_steps = sum(-(-self._count(replica) // shards.batch) for replica in parts.samples.replicas)

    def _count(self, replica: int) -> int:
        first, end = self._samples.shards.bounds(replica)
        return end - first

    def begins(self, turns: Sequence[Turn]) -> list[int]:
        """The first place in the order, of each batch."""
        found = [begin for begin, _ in self._samples.batches(turns)]
        return found if self.resident else [0] * len(found)

    def sizes(self, turn: Turn) -> list[int]:
        """How many samples each batch of a turn has."""
        return [end - begin for begin, end in self._samples.batches([turn])]

    def bring(self) -> None:
        """See to it that the next batch is on the device when the stream gets there."""
        if isinstance(self._feed, DeviceFeed):
            self._feed.skip()
            return
        images, labels = self._feed.next()
        self._taker.images[: len(images)].copy_(images)
        self._taker.labels[: len(labels)].copy_(labels)

    def take(self, places: torch.Tensor, cursor: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch at the cursor, ready for the network."""
        return self._taker.take(places, cursor, size, self._dtype)
