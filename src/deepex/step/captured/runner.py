"""The whole step as one CUDA graph: input, forward, loss, backward and update are launched together, by one call of the host.

    runner = CapturedRunner(parts, clock)      # captures; the arena is left as it was
    for steps, samples in runner.steps(epoch, turn): …

What changes from step to step lies on the device before the epoch begins (source.py), and a cursor there, which the last kernel of
a step moves on. So a replay needs nothing from the host, and several steps can be one graph where a step is shorter than a launch
takes. In bf16 the network computes with a twin of the arena's weights (twin.py); the update writes it, and the start of each turn
does anew, because a sync or another replica may have changed the weights.

Graphs share one pool of memory: they run one after another, and none leaves anything there for another.
"""

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from typing_extensions import override

from deepex.data.feeds.samples import Turn
from deepex.errors import ConfigError
from deepex.record.clock import BACKWARD, FORWARD, INPUT, UPDATE, PhaseClock
from deepex.step.captured.batch_table import BatchTable
from deepex.step.captured.bf16_weights import Bf16Weights
from deepex.step.captured.fusion import Fused, fuse
from deepex.step.captured.fusion.parts import FusionContext
from deepex.step.captured.fusion.trace import host_random
from deepex.step.captured.graph import replace_memsets
from deepex.step.captured.kernels.loss import loss_and_sums, unit
from deepex.step.captured.kernels.update import Gradients, finish_kernel
from deepex.step.captured.linear_ops import Lane
from deepex.step.captured.updates import CapturedUpdate
from deepex.step.eager import generator_of
from deepex.step.runner import Runner, StepChoice, StepInputs

_WARM_UPS: Final = 2
_LAP_SECONDS: Final = 0.005  # a graph is worth about so much work, or launching it would keep the host busy
_MOST_STEPS: Final = 32  # of one graph
_AHEAD_SECONDS: Final = 0.06  # the host is once to twice this ahead of the device, or a lap or two if they are longer
_MOST_NAP_SECONDS: Final = 0.05
_KEPT_PART: Final = 2  # of what the backward pass needs, half may stay longer, for gradients of weights that are behind


@dataclass
class Graph:
    """`steps` steps on batches of `size` samples, ready to run. `tables` say where their gradients lie."""

    size: int
    steps: int
    run: Callable[[], None]
    tables: list[Gradients] = field(default_factory=list)

    def fits(self, sizes: list[int]) -> bool:
        """Whether these batches are next."""
        return sizes[: self.steps] == [self.size] * self.steps


@final
class CapturedRunner(Runner):
    """Replays captured steps. What it needs is captured when it is built; the state of the arena is put back afterwards.

    On a CPU, which has no graphs, it runs the same kernels step by step: slowly, and so that they can be tested.
    """

    def __init__(self, inputs: StepInputs, clock: PhaseClock) -> None:
        self._inputs, self._clock, self._device = inputs, clock, inputs.arena.memory.device
        self._bf16, self._update = inputs.options.precision == "bf16", CapturedUpdate(inputs.optimiser)
        self._gathers = self._update.gathers or not inputs.updates
        self._twin = Bf16Weights(inputs.arena, bf16=self._bf16, spare=None if self._gathers else inputs.arena.gradients)
        self._lane = Lane(self._device)
        key = torch.zeros(1, dtype=torch.int64, device=self._device)
        folds = not inputs.task.needs_images
        self._fused = self._fuse(FusionContext(weights=self._twin.of, lane=self._lane, key=key, folds=folds, room=self._twin.room))
        self._source = BatchTable(inputs, self._fused.fold, key, most_steps_at_once=_MOST_STEPS)
        self.sums = torch.zeros(1 + len(inputs.task.measures), dtype=torch.float64, device=self._device)
        self._random, self._row, self.step_seconds = False, 0, 0.0
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._pool: Any = None
        began = time.perf_counter()
        self.laps = self._prepare_laps()
        seconds, steps = time.perf_counter() - began, self.laps[0].steps
        lap_seconds = max(self.step_seconds * steps, 1e-6)
        self._stride, self._since = max(1, int(_AHEAD_SECONDS / lap_seconds)), 0
        self._nap = min(self._stride * lap_seconds / 2, _MOST_NAP_SECONDS)
        self._queued = torch.cuda.Event() if self._stream is not None else None
        reason = f"one launch for {'each step' if steps == 1 else f'{steps} steps'}; captured in {seconds:.1f} s"
        self.choice = StepChoice(kind="captured", reason=reason, fusions=dict(self._fused.found))

    @override
    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        self._inputs.feed.begin(epoch, turns)
        self._source.begin(epoch, turns)
        self._row = 0

    @override
    def steps(self, epoch: int, turn: Turn) -> Iterator[tuple[int, int]]:
        self._twin.cast()
        sizes = self._source.batches(turn)
        while sizes:
            lap = next(lap for lap in self.laps if lap.fits(sizes))
            self._source.bring(lap.steps)
            if self._random:
                generator_of(self._device).manual_seed(self._source.keys[self._row])
            lap.run()
            self._keep_pace()
            self._row += lap.steps
            del sizes[: lap.steps]
            yield lap.steps, lap.steps * lap.size

    @override
    def update(self, rate: float) -> None:
        self._inputs.optimiser.update(rate)

    def _keep_pace(self) -> None:
        """Every so many laps, wait for what was queued when this last did: the device goes on with what was queued since.

        If the queue filled up, the next launch would wait for room in it, and keep a core busy with that.
        """
        self._since += 1
        if self._queued is None or self._since < self._stride:
            return
        before, self._queued, self._since = self._queued, torch.cuda.Event(), 0
        self._queued.record()
        while not before.query():  # which does not make the device wait
            time.sleep(self._nap)

    # --- one step

    def _step(self, size: int, table: Gradients, *, capturing: bool, strict: bool = False) -> None:
        """One step on the current stream. `strict`: an error if it makes the host wait for the device."""
        inputs, clock = self._inputs, self._clock
        images, labels = self._source.take(size)
        clock.mark(INPUT)
        with _no_waiting() if strict else nullcontext():
            loss, (first, *others) = self._compute(images, labels)
        table.point(self._twin.gradients(self._lane))
        if not capturing:
            table.send()
        if self._gathers:
            table.gather(inputs.arena.gradients)
        clock.mark(BACKWARD)
        if inputs.updates:
            self._update(table, self._twin, self._source.rates, self._source.cursor)
        for total, value in zip(self.sums[2:], others, strict=True):
            total.add_(value)
        finish_kernel[(1,)](self.sums, loss, first, self._source.cursor, float(size), num_warps=1)
        if inputs.updates:
            clock.mark(UPDATE)

    def _compute(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forwards and backwards: the loss, and the sums of the measures."""
        self._twin.forget_gradients()
        self._lane.clear()
        before = self._allocated()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            output = self._fused(images)
        loss, sums = loss_and_sums(self._inputs.task, output, images, labels)
        if self._fused.counters:
            torch._foreach_add_(self._fused.counters, self._fused.calls)
        self._clock.mark(FORWARD)
        self._lane.most_bytes = (self._allocated() - before) // _KEPT_PART
        with torch.autograd.set_multithreading_enabled(False):  # a thread of its own would have memory for products of its own
            loss.backward(unit(self._device))
        self._lane.join()
        self._inputs.arena.take_back_buffers()  # part of the graph: the values of buffers that the network replaces
        return loss.detach(), sums

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._stream is not None else 0

    def _fuse(self, means: FusionContext) -> Fused:
        """The kernels want maps in channels-last order."""
        inputs = self._inputs
        if inputs.options.fuse and inputs.options.layout == "channels_last":
            return fuse(inputs.network, means)
        plain = inputs.options.layout == "contiguous"
        return Fused(lambda x: inputs.network(x.contiguous() if plain else x), Counter(), [])

    # --- capture

    def _prepare_laps(self) -> list[Graph]:
        """Laps for every size of batch there is; the full one first, also with several steps if one is short."""
        kept = self._kept_state()
        try:
            full, *rest = self._source.sizes
            one = self._prepare(full, 1)
            laps = [one]
            if self._stream is not None:
                self.step_seconds = self._time(one)
                steps = min(_MOST_STEPS, self._inputs.turn_steps, int(_LAP_SECONDS / self.step_seconds))
                if steps > 1 and not self._random and self._inputs.updates and self._source.resident:
                    laps.insert(0, self._prepare(full, steps))
            return [*laps, *(self._prepare(size, 1) for size in rest)]
        finally:
            self._put_back(kept)

    def _prepare(self, size: int, steps: int) -> Graph:
        tables = [self._update.table() for _ in range(steps)]
        if self._stream is None:
            self._warm_up(size, tables[0])
            return Graph(size, steps, lambda: self._step(size, tables[0], capturing=False), tables)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                self._warm_up(size, tables[0])
        finally:  # a step that cannot be captured is still at work there, on weights that are about to be put back
            torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        graph, current = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream(self._device)
        # Not "global": a thread may be bringing samples to the device meanwhile.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                for table in tables:
                    self._step(size, table, capturing=True)
        except BaseException:
            torch.cuda.set_stream(current)  # where torch does not leave it after a failure
            raise
        replace_memsets(graph)
        graph.instantiate()
        self._pool = graph.pool()
        for table in tables:
            table.send()
        return Graph(size, steps, graph.replay, tables)

    def _warm_up(self, size: int, table: Gradients) -> None:
        """Run the step as it is: cuDNN and Triton choose and compile, and what the network does beside arithmetic shows.

        What a graph could not repeat is found here, because a capture that fails in the middle leaves torch unsettled.
        """
        generator, cuda = generator_of(self._device), self._stream is not None
        for again in (False, True):
            self._source.cursor.zero_()
            before, drawn, held = generator.get_state(), host_random(), self._attributes()
            self._step(size, table, capturing=False, strict=again and cuda)
            self._random = self._random or not torch.equal(generator.get_state(), before)
            if cuda and host_random() != drawn:
                raise ConfigError("the network draws random numbers on the host, which a replay would not")
            if again and self._attributes() != held:
                raise ConfigError("the network changes its attributes in each step, which a replay would not")
        self._source.cursor.zero_()

    def _attributes(self) -> list[Any]:
        """What the network's modules hold beside tensors and modules: numbers, words."""
        modules, plain = self._inputs.network.modules(), (int, float, str)
        return [(name, value) for module in modules for name, value in vars(module).items() if isinstance(value, plain)]

    def _time(self, lap: Graph) -> float:
        """Seconds of a step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._source.cursor.zero_()
        lap.run()
        start.record()
        for _ in range(_WARM_UPS):
            lap.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / _WARM_UPS

    def _kept_state(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What warming up changes, and its values; in host memory, because the device's is needed for the step."""
        self._twin.cast()
        held = [self._inputs.arena.memory, *(b for b in self._inputs.network.buffers() if not b.is_floating_point())]
        return [(tensor, tensor.to("cpu", copy=True)) for tensor in held]

    def _put_back(self, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._inputs.arena.take_back_buffers()
        for tensor, value in kept:
            tensor.copy_(value)
        self._twin.forget_gradients()
        self._lane.clear()
        self._inputs.arena.take_back_gradients()
        self.sums.zero_()
        self._source.cursor.zero_()
        self._clock.reset()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within, whatever makes the host wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
