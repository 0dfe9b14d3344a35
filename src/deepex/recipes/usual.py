"""What a caller may have set in PyTorch, put aside while a run lasts: its numbers follow from its configuration alone.

    with torch_as_usual():
        …                       # no autocast, gradients on, float32, the CPU; afterwards the caller's random numbers go on

What is as usual already costs nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Put a caller's modes and defaults aside, and its generators back afterwards."""
    on_gpu = torch.cuda.is_initialized()
    before, on_device = torch.random.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    try:
        with ExitStack() as held:
            for kind in ("cpu", "cuda", "xpu"):
                if torch.is_autocast_enabled(kind):
                    held.enter_context(torch.autocast(kind, enabled=False))
            if torch.is_inference_mode_enabled():
                held.enter_context(torch.inference_mode(False))
            if not torch.is_grad_enabled():
                held.enter_context(torch.enable_grad())
            if torch.get_default_device().type != "cpu":
                held.enter_context(torch.device("cpu"))
            if torch.get_default_dtype() != torch.float32:
                held.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.random.set_rng_state(before)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
