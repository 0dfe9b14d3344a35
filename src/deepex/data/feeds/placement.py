"""Where a rank's samples live: chosen from what they need and what is free, and said why.

placement = choose_placement("auto", samples_bytes=82_000_000_000, device="cuda", free_device_bytes=140_000_000_000, …)
placement.kind, placement.reason        # "device", "82.0 GB of samples per rank and … fit in the GPU's free 140.0 GB"
feed = make_feed(placement, samples, device, comm=comm, verify=True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from deepex.comm.base import Communicator
from deepex.data.feeds.cache import Cache
from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.feed import Feed, HostFeed, SlotFeed
from deepex.data.feeds.samples import Samples
from deepex.data.feeds.window import Stream

PLACEMENTS: Final = ("auto", "device", "host", "stream")
_HOST_SHARE: Final = 0.8  # of what is free there; the rest is for the page cache and the other users of the machine
_ACTIVATION_FACTOR: Final = 1.25  # gradients of activations come beside them, and blocks of memory do not fit exactly
_UNKNOWN_SHARE: Final = 0.5  # of what is free, kept for activations of which nothing is known
_DEVICE_RESERVE_BYTES: Final = 1_000_000_000  # of a GPU: the CUDA context and cuDNN's workspaces


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`kind` is device, host or stream; `reason` says why; `estimate` has the bytes that decided."""

    kind: str
    reason: str
    estimate: dict[str, int] = field(default_factory=dict)


def choose_placement(
    asked: str,
    *,
    samples_bytes: int,
    arena_bytes: int,
    activation_bytes: int | None,
    device: str,
    free_device_bytes: int,
    free_host_bytes: int,
    ranks_on_device: int = 1,
    through_host: bool = False,
    replicas_per_rank: int = 1,
) -> Placement:
    """Choose the fastest placement that fits, or take the one that is asked for.

    `samples_bytes` counts those for validation too, and free host memory is this rank's share of its node's. On a CPU, `device` is
    host memory, and so is `host`. `through_host`: samples are collected there before they go to a GPU.
    """
    on_gpu = device == "cuda"
    free_device = free_device_bytes // ranks_on_device if on_gpu else int(_HOST_SHARE * free_host_bytes)
    free_host = int(_HOST_SHARE * free_host_bytes)
    if activation_bytes is None:
        activations, source = math.ceil(_UNKNOWN_SHARE * free_device), "unknown, half of it kept free"
    else:
        activations, source = math.ceil(_ACTIVATION_FACTOR * activation_bytes), "estimated"
    reserve = _DEVICE_RESERVE_BYTES if on_gpu else 0
    network = arena_bytes + activations + reserve
    estimate = {
        "samples_bytes": samples_bytes,
        "arena_bytes": arena_bytes,
        "activation_bytes": activations,
        "reserve_bytes": reserve,
        "device_bytes": samples_bytes + network,
        "free_device_bytes": free_device,
        "free_host_bytes": free_host,
    }
    size = f"{_mb(samples_bytes)} of samples per rank"
    needs = f"{size} and {_mb(network)} for the network (activations {source})"
    if asked != "auto":
        kind, reason = asked, f"asked for; {size}"
    elif samples_bytes + network <= free_device and (samples_bytes <= free_host or not through_host):
        kind, reason = "device", f"{needs} fit in {'the GPU' if on_gpu else 'memory'}'s free {_mb(free_device)}"
    elif on_gpu and samples_bytes <= free_host:
        kind, reason = "host", f"{needs} do not fit in the GPU's free {_mb(free_device)}, but in the host's {_mb(free_host)}"
    else:
        free = free_host if through_host else max(free_device, free_host)
        kind, reason = "stream", f"{needs} do not fit in memory ({_mb(free)} free): read ahead of use"
    if kind == "stream" and replicas_per_rank > 1:
        reason += "; replicas that take turns within an epoch are gathered from memory maps, and the page cache bounds the memory"
    return Placement(kind=kind, reason=reason, estimate=estimate)


def most_modest(placements: Sequence[Placement]) -> Placement:
    """The one that all ranks can take: they read for each other, so they must agree."""
    return max(placements, key=lambda placement: PLACEMENTS.index(placement.kind))


def make_feed(
    placement: Placement,
    samples: Samples,
    device: torch.device,
    *,
    comm: Communicator | None = None,
    verify: bool = False,
) -> Feed:
    """Build the feed of a placement. Collective over `comm`, whose ranks read for each other; without one, this rank is alone."""
    on_gpu = device.type != "cpu"
    if placement.kind == "device" and on_gpu:
        return DeviceFeed(samples, device, comm, verify=verify)
    store = Stream(samples, verify=verify) if placement.kind == "stream" else Cache(samples, comm, verify=verify)
    return SlotFeed(samples, store, device) if on_gpu else HostFeed(samples, store)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"
