"""Where a rank's samples live: chosen from what they need and what is free, and said why.

choose_placement("auto", samples_bytes=6e9, device="cuda", free_device_bytes=140e9, free_host_bytes=500e9).reason
"""

from dataclasses import dataclass
from typing import Final

import torch

from deepex.data.feed import DeviceFeed, Feed, Samples, host_feed, stream_feed

PLACEMENTS: Final = ("auto", "device", "host", "stream")
_SHARE: Final = 0.5  # of what is free; the rest is for activations, the arena and the other users of the machine


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`kind` is device, host or stream; `reason` says why."""

    kind: str
    reason: str


def choose_placement(asked: str, *, samples_bytes: int, device: str, free_device_bytes: int, free_host_bytes: int) -> Placement:
    """Choose the fastest placement that fits in half of what is free; on a CPU, `device` is host memory without a worker thread."""
    size = f"{samples_bytes / 1e6:.1f} MB of samples per rank"
    if asked != "auto":
        return Placement(kind=asked, reason=f"asked for; {size}")
    if samples_bytes <= _SHARE * free_device_bytes:
        where = "the GPU" if device == "cuda" else "memory"
        return Placement(kind="device", reason=f"{size} fit in half of {where}'s free {free_device_bytes / 1e6:.0f} MB")
    if samples_bytes <= _SHARE * free_host_bytes:
        return Placement(kind="host", reason=f"{size} do not fit on the device but in half of the host's free memory")
    return Placement(kind="stream", reason=f"{size} do not fit in memory: read from the files ahead of use")


def make_feed(placement: Placement, samples: Samples, device: torch.device) -> Feed:
    """Build the feed of a placement."""
    if placement.kind == "device":
        return DeviceFeed(samples, device)
    return host_feed(samples, device) if placement.kind == "host" else stream_feed(samples, device)
