"""What a user would take instead of DeepEx to train an image network on one GPU, each at its best settings.

    peer = make_peer("compile+graph", workload, images, labels, network)
    peer.epoch()                                # queues one epoch; the caller synchronises and times
    peer.num_samples, peer.setup_seconds, peer.loss()
    measure_jax(workload, repeats=10)           # in a process of its own, its epochs timed there

All start from uint8 samples (count, H, W, C) on the device, shuffle them every epoch, drop the last partial batch, train in bf16 on
float32 weights with SGD and momentum 0.9. Nothing here imports torch before `make_peer`: JAX's process must not load torch's cuDNN.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from peers.jax_process import measure_jax
from peers.workload import RATE, Unavailable, Workload

if TYPE_CHECKING:
    import torch

    from peers.base import Peer

__all__ = ["PEERS", "RATE", "Unavailable", "Workload", "make_peer", "measure_jax", "peak_bytes"]

PEERS = ("eager", "compile", "compile+graph", "lightning", "timm", "jax")


def make_peer(
    name: str, workload: Workload, images: "torch.Tensor", labels: "torch.Tensor", network: "torch.nn.Module | None", **options: Any
) -> "Peer":
    """Build a peer around a copy of `network`, and warm it up: compilation, cuDNN's search and capture are over when it returns.

    Options: `rate`; `mode` of torch.compile, None for no compilation (not for "lightning", which has `compiled=False`). It raises
    Unavailable, with the reason, for a peer that is not installed or does not apply to the workload.
    """
    from peers.lightning_fit import make_lightning
    from peers.torch_loop import Loop, make_timm

    makers = {
        "eager": Loop,
        "compile": partial(Loop, mode="default"),
        "compile+graph": partial(Loop, mode="default", captured=True),
        "lightning": make_lightning,
        "timm": make_timm,
    }
    if name not in makers:
        raise Unavailable(f"no peer {name!r} in this process: choose from {', '.join(makers)}; JAX is measured by measure_jax")
    return makers[name](workload, images, labels, network, **options)


def peak_bytes() -> int:
    """The most bytes of device memory that tensors took since the last call (0 without a GPU), which starts the next count.

    A captured graph takes its memory while it is captured, and replays allocate nothing: count from before `make_peer`.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak
