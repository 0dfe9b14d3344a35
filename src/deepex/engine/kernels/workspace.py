"""Memory that kernels share from launch to launch: partial sums, and counters that say which program arrived last.

    parts = WORKSPACE.partials(y.device, count)   # float32, holds anything
    there = WORKSPACE.arrivals(y.device, count)   # int32, all zero; the last program to arrive leaves it so

Every kernel of a device takes the same memory, one after the other: it belongs to the launch in flight, so all launches have to be
on one stream (or on streams that wait for each other). What a captured graph uses is kept for ever, hence its pointers stay good.
"""

from dataclasses import dataclass, field
from typing import Final, final

import torch

INTERPRETED_PROCESSORS: Final = 2  # without a GPU: enough for several programs to share a sum, few enough to be quick


@final
@dataclass(slots=True)
class Workspace:
    """Buffers by device and size, made at first use."""

    _arrivals: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    _partials: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    _processors: dict[torch.device, int] = field(default_factory=dict)

    def arrivals(self, device: torch.device, count: int) -> torch.Tensor:
        """`count` counters at zero, which every kernel has to leave at zero."""
        key = (device, count)
        if key not in self._arrivals:
            if _capturing(device):
                raise RuntimeError(
                    f"{count} arrival counters are needed for the first time while a CUDA graph is captured; their zeros would be "
                    "written at its replay only: run the same step once before capturing it"
                )
            self._arrivals[key] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._arrivals[key]

    def partials(self, device: torch.device, count: int) -> torch.Tensor:
        """Room for `count` float32 numbers, holding anything."""
        key = (device, count)
        if key not in self._partials:
            made = torch.empty(count, dtype=torch.float32, device=device)
            if _capturing(device):
                return made  # memory of the graph's own pool: it goes with the graph
            self._partials[key] = made
        return self._partials[key]

    def processors(self, device: torch.device) -> int:
        """How many programs run side by side at least: the GPU's multiprocessors."""
        if device not in self._processors:
            cuda = device.type == "cuda"
            self._processors[device] = (
                torch.cuda.get_device_properties(device).multi_processor_count if cuda else INTERPRETED_PROCESSORS
            )
        return self._processors[device]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


WORKSPACE: Final = Workspace()


def arrivals(device: torch.device, count: int) -> torch.Tensor:
    """`count` zeroed int32 counters of the shared workspace; kernels leave them zeroed."""
    return WORKSPACE.arrivals(device, count)


def as_rows(maps: torch.Tensor) -> torch.Tensor:
    """The same tensor with its elements in the order rows × channels: a matrix, or maps in channels-last order."""
    return maps.contiguous(memory_format=torch.channels_last) if maps.dim() == 4 else maps.contiguous()


def divide_rows(rows: int, block: int, parts: int) -> tuple[int, int]:
    """Share `rows` out among at most `parts` programs in whole blocks: rows for each, and how many programs have any."""
    blocks = -(-rows // block)
    each = max(-(-blocks // parts), 1) * block
    return each, max(-(-rows // each), 1)
