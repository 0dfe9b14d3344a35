"""Which way of running steps is fastest here: one by one, compiled, or captured; and why.

    runner, clock = make_runner(parts, step)

On a GPU a captured step is faster whatever the network. It costs a start: the kernels are compiled (once on a machine, then they
are kept on disk), cuDNN looks for its fastest algorithms, the step is captured. A run that is over sooner does without, unless
`step` is `fastest`: to measure what a longer one would do.
"""

from typing import Any, Final

import torch

from deepex.engine.compiled import compile_step
from deepex.engine.runner import EagerRunner, Parts, Runner, StepChoice
from deepex.engine.step import EagerStep
from deepex.engine.trial import check_settings
from deepex.errors import ConfigError
from deepex.record.clock import DeviceClock, Event, HostClock, PhaseClock

_CAPTURE_SECONDS: Final = 20.0


def make_runner(
    parts: Parts, step: EagerStep, *, steps: int, begun: str = "", clock: PhaseClock | None = None
) -> tuple[Runner, PhaseClock]:
    """The runner that `step` of the configuration asks for, and its phase clock.

    `steps`: how many the run has on this rank. `begun`: what was chosen for the run before, if it goes on; it stays so.
    """
    asked, device = parts.config.step, parts.arena.memory.device
    chosen = begun or asked if asked in ("auto", "fastest") else asked
    check_settings(parts.config, device)
    if chosen == "compiled":
        choice = compile_step(parts.network, step, parts.arena.take_back_buffers, batch=parts.samples.shards.batch)
        return _one_by_one(parts, step, clock, choice)
    if chosen in ("auto", "fastest", "captured") and device.type == "cuda":
        timed = chosen == "auto" and not parts.config.deterministic  # what was timed may decide otherwise next time
        short = _too_short(parts, step, steps) if timed else None
        if short is None:
            try:
                return _captured(parts, clock)
            except Exception as error:
                if asked == "captured":
                    raise ConfigError(f"step is captured, but this network cannot be ({error}): set step=eager") from error
                short = f"capturing it failed ({type(error).__name__}: {_first_line(error)})"
        return make_eager(parts, step, clock, f"{short}: PyTorch's operators one by one")
    why = "a CPU" if device.type == "cpu" else "as the run began"
    return make_eager(parts, step, clock, "asked for" if asked == "eager" else f"{why}: PyTorch's operators one by one")


def make_eager(parts: Parts, step: EagerStep, clock: PhaseClock | None, reason: str) -> tuple[Runner, PhaseClock]:
    """The runner of PyTorch's operators one by one, also after another has been tried."""
    parts.arena.take_back_gradients()
    parts.arena.take_back_buffers()
    return _one_by_one(parts, step, clock, StepChoice(kind="eager", reason=reason, fusions={}))


def _one_by_one(parts: Parts, step: EagerStep, clock: PhaseClock | None, choice: StepChoice) -> tuple[Runner, PhaseClock]:
    clock = clock or (HostClock() if parts.arena.memory.device.type == "cpu" else DeviceClock(_make_event))
    return EagerRunner(parts, step, clock, choice), clock


def _captured(parts: Parts, clock: PhaseClock | None) -> tuple[Runner, PhaseClock]:
    from deepex.engine.captured import CapturedRunner
    from deepex.engine.kernels.stamp import StampClock

    clock = clock or StampClock(parts.arena.memory.device)
    return CapturedRunner(parts, clock), clock


def _too_short(parts: Parts, step: EagerStep, steps: int) -> str | None:
    """Why a run is over before a capture would have paid; None if it is not."""
    seconds = steps * step.trial_seconds(parts.samples.shards.batch)
    return f"the whole run takes about {seconds:.0f} s so" if seconds < _CAPTURE_SECONDS else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:200]


def _make_event() -> Event:
    event: Any = torch.Event("cuda", enable_timing=True)  # recorded in 2.4 µs; torch.cuda.Event, which is Python, takes 10.8 µs
    made: Event = event
    return made
