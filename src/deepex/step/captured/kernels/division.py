"""How kernels divide maps among their programs.

A map in channels-last order, or the input of a dense layer, is a matrix of rows × channels. A kernel that adds up over rows gives
each program some of them; what the programs found is added up by a small kernel behind it, in a fixed order.
"""

import functools
from typing import Final

import torch
import triton
import triton.language as tl

FINISHED: Final = 8  # channels of which one program of a finishing kernel adds up the sums
_INTERPRETED_PROCESSORS: Final = 2  # without a GPU: enough for several programs to share a sum, few enough to be quick


@triton.jit
def tile(row, channel, num_rows, num_channels):
    """Where some rows and channels are in a map, and which of them there are."""
    inside = (row < num_rows)[:, None] & (channel < num_channels)[None, :]
    return row.to(tl.int64)[:, None] * num_channels + channel[None, :], inside


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run side by side at least: the GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED_PROCESSORS


def at_once(parts: int) -> int:
    """How many programs' sums a finishing kernel adds at once."""
    return min(1 << (parts - 1).bit_length(), 2048 // FINISHED)


def as_rows(maps: torch.Tensor) -> torch.Tensor:
    """The same tensor with its elements in the order rows × channels: a matrix, or maps in channels-last order."""
    return maps.contiguous(memory_format=torch.channels_last) if maps.dim() == 4 else maps.contiguous()


def divide_rows(rows: int, block: int, parts: int) -> tuple[int, int]:
    """Share `rows` out among at most `parts` programs in whole blocks: rows for each, and how many programs have any."""
    blocks = -(-rows // block)
    each = max(-(-blocks // parts), 1) * block
    return each, max(-(-rows // each), 1)
