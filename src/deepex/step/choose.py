"""Which way of running steps is fastest here: one by one, compiled, or captured; and why.

    runner, clock = make_runner(parts, step)

On a GPU a captured step is faster whatever the network. It costs a start: the kernels are compiled (once on a machine, then they
are kept on disk), cuDNN looks for its fastest algorithms, the step is captured. A run that is over sooner does without, unless
`step` is `fastest`: to measure what a longer one would do.
"""

from typing import Any, Final

import torch

from deepex.errors import ConfigError
from deepex.record.clock import DeviceClock, Event, HostClock, PhaseClock
from deepex.step.compiled import compile_step
from deepex.step.eager import EagerStep
from deepex.step.runner import EagerRunner, Runner, StepChoice, StepInputs

_CAPTURE_SECONDS: Final = 20.0


def make_runner(
    inputs: StepInputs, step: EagerStep, *, steps: int, begun: str = "", clock: PhaseClock | None = None
) -> tuple[Runner, PhaseClock]:
    """The runner that `step` of the configuration asks for, and its phase clock.

    `steps`: how many the run has on this rank. `begun`: what was chosen for the run before, if it goes on; it stays so.
    """
    asked, device = inputs.options.step, inputs.arena.memory.device
    chosen = begun or asked if asked in ("auto", "fastest") else asked
    check_settings(inputs.options.step, device)
    if chosen == "compiled":
        choice = compile_step(inputs.network, step, inputs.arena.take_back_buffers, batch=inputs.samples.shards.batch)
        return _one_by_one(inputs, step, clock, choice)
    if chosen in ("auto", "fastest", "captured") and device.type == "cuda":
        timed = chosen == "auto" and not inputs.options.deterministic  # what was timed may decide otherwise next time
        short = _too_short(inputs, step, steps) if timed else None
        if short is None:
            try:
                return _captured(inputs, clock)
            except Exception as error:
                if asked == "captured":
                    raise ConfigError(f"step is captured, but this network cannot be ({error}): set step=eager") from error
                short = f"capturing it failed ({type(error).__name__}: {_first_line(error)})"
        return make_eager(inputs, step, clock, f"{short}: PyTorch's operators one by one")
    why = "a CPU" if device.type == "cpu" else "as the run began"
    return make_eager(inputs, step, clock, "asked for" if asked == "eager" else f"{why}: PyTorch's operators one by one")


def check_settings(step: str, device: torch.device) -> None:
    """Raise ConfigError for what a device cannot do."""
    if step == "captured" and device.type != "cuda":
        raise ConfigError("step is captured, but the device is a CPU: only a GPU can replay a step; set step=auto")


def make_eager(inputs: StepInputs, step: EagerStep, clock: PhaseClock | None, reason: str) -> tuple[Runner, PhaseClock]:
    """The runner of PyTorch's operators one by one, also after another has been tried."""
    inputs.arena.take_back_gradients()
    inputs.arena.take_back_buffers()
    return _one_by_one(inputs, step, clock, StepChoice(kind="eager", reason=reason, fusions={}))


def _one_by_one(inputs: StepInputs, step: EagerStep, clock: PhaseClock | None, choice: StepChoice) -> tuple[Runner, PhaseClock]:
    clock = clock or (HostClock() if inputs.arena.memory.device.type == "cpu" else DeviceClock(_make_event))
    return EagerRunner(inputs, step, clock, choice), clock


def _captured(inputs: StepInputs, clock: PhaseClock | None) -> tuple[Runner, PhaseClock]:
    from deepex.step.captured.kernels.stamp import StampClock
    from deepex.step.captured.runner import CapturedRunner

    clock = clock or StampClock(inputs.arena.memory.device)
    return CapturedRunner(inputs, clock), clock


def _too_short(inputs: StepInputs, step: EagerStep, steps: int) -> str | None:
    """Why a run is over before a capture would have paid; None if it is not."""
    seconds = steps * step.trial_seconds(inputs.samples.shards.batch)
    return f"the whole run takes about {seconds:.0f} s so" if seconds < _CAPTURE_SECONDS else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:200]


def _make_event() -> Event:
    event: Any = torch.Event("cuda", enable_timing=True)  # recorded in 2.4 µs; torch.cuda.Event, which is Python, takes 10.8 µs
    made: Event = event
    return made
