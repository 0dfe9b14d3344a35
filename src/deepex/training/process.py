"""The process-wide switches that a run needs, for as long as it needs them."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch

from deepex.machine.cache import keep_compiled
from deepex.machine.heap import keep_heap
from deepex.training.job import Job
from deepex.training.usual import round_products


@contextmanager
def process_settings(job: Job, threads: int, environ: MutableMapping[str, str]) -> Iterator[str]:
    """The process-wide switches that a run needs; those of torch are put back afterwards, because the process may be the caller's.

    Gives what was done about the heap; that cannot be put back.
    """
    config = job.config
    before = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
    )
    onednn = torch.backends.mkldnn.enabled
    torch.set_num_threads(threads)
    # Bits are promised on CPUs. Not `use_deterministic_algorithms`, which loads Inductor to tell it: seconds of every start.
    strictness = "warn" if job.device.type == "cuda" else "error"
    torch.set_deterministic_debug_mode(strictness if config.deterministic else "default")
    torch.backends.cudnn.benchmark = not config.deterministic
    put_back = round_products(tf32=config.precision == "tf32")
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    torch.backends.mkldnn.enabled = config.onednn and torch.backends.mkldnn.is_available()  # type: ignore[assignment] # annotated as what stands behind it
    if config.precision == "bf16" and job.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # As PyTorch does itself at the first product, which fails, with a page of its stack.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment] # annotated as what stands behind it
    heap = keep_heap(environ) if job.device.type == "cpu" else "the C library's own way: the work is on the GPU"
    if config.step == "compiled":
        keep_compiled(environ)  # stays named there, as Inductor's own choice would
    try:
        yield heap
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.backends.cudnn.benchmark = before[2]
        put_back()
        torch.backends.mkldnn.enabled = onednn
