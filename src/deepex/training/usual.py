"""What a caller may have set in PyTorch, put aside while a run lasts: its numbers follow from its configuration alone.

    with torch_as_usual():
        …                       # no autocast, gradients on, float32, the CPU; afterwards the caller's random numbers go on

What is as usual already costs nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

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


def round_products(*, tf32: bool) -> Callable[[], None]:
    """Set how products of float32 are rounded, on CPUs not at all; what this gives puts it back, whichever way the caller took.

    PyTorch's older way asks and sets for all; after the newer one, a setting for each library, the older does not answer.
    """
    backends: Any = torch.backends  # whose annotations do not know all that it has
    cuda, cudnn, onednn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    exact = (onednn.conv, onednn.rnn)
    kept = [(library, library.fp32_precision) for library in (cuda, cudnn.conv, cudnn.rnn, onednn.matmul, *exact)]
    products, convolutions = list[str](), list[bool]()
    with suppress(RuntimeError):
        products.append(torch.get_float32_matmul_precision())
    with suppress(RuntimeError):
        convolutions.append(cudnn.allow_tf32)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32
    for library in exact:
        library.fp32_precision = "ieee"

    def put_back() -> None:
        for precision in products:
            torch.set_float32_matmul_precision(precision)
        for allowed in convolutions:
            cudnn.allow_tf32 = allowed
        for library, precision in kept:
            library.fp32_precision = precision

    return put_back
