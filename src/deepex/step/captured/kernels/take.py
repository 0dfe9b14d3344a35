"""A batch from samples on the device, in one launch: gather, crop, flip, scale, standardise, convert, lay out.

    taker = Taker(images, labels, order, …)
    taker.take(places, cursor, out, out_labels)

Which batch it is stands on the device too: row `cursor` of `places` has its first place in `order`, and the key of its random
numbers. So a captured graph takes another batch in each replay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def take_kernel(
    images, labels, order, places, cursor, out, out_labels, out_key, factor, offset,
    height, width, out_height, out_width, pad, pixels, wide, stored,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, MOVES: tl.constexpr, FLIPS: tl.constexpr, FOLD: tl.constexpr, BORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK pixels of one image of the batch.

    FOLD > 0: squares of so many pixels a side become channels, after a border of zeros (for a convolution of that stride).
    """
    image = tl.program_id(0)
    step = tl.load(cursor)
    begin = tl.load(places + 2 * step)
    key = tl.load(places + 2 * step + 1)
    sample = tl.load(order + begin + image)
    if tl.program_id(1) == 0:
        tl.store(out_labels + image, tl.load(labels + sample))
        if image == 0:
            tl.store(out_key, key)
    top, left, mirrored = 0, 0, 0
    if MOVES or FLIPS:
        first, second, third, _ = tl.randint4x(key, image)
        if MOVES:
            top = (first.to(tl.uint32, bitcast=True) % (height - out_height + 2 * pad + 1).to(tl.uint32)).to(tl.int32) - pad
            left = (second.to(tl.uint32, bitcast=True) % (width - out_width + 2 * pad + 1).to(tl.uint32)).to(tl.int32) - pad
        if FLIPS:
            mirrored = third & 1
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDE)
    if FOLD:
        part = channel // CHANNELS
        row = FOLD * (pixel // wide)[:, None] + (part // FOLD)[None, :] - BORDER
        column = FOLD * (pixel % wide)[:, None] + (part % FOLD)[None, :] - BORDER
        kept = (part < FOLD * FOLD)[None, :] & (row >= 0) & (row < out_height) & (column >= 0) & (column < out_width)
        source = (channel % CHANNELS)[None, :]
    else:
        row = (pixel // out_width)[:, None]
        column = (pixel % out_width)[:, None]
        kept = (channel < CHANNELS)[None, :]
        source = channel[None, :]
    if FLIPS:
        column = tl.where(mirrored == 1, out_width - 1 - column, column)
    row += top
    column += left
    here = kept & (pixel < pixels)[:, None]
    inside = here & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = (row * width + column) * CHANNELS + source
    value = tl.load(images + sample * height * width * CHANNELS + at, mask=inside, other=0).to(tl.float32)
    value = value * tl.load(factor + source, mask=source < CHANNELS, other=0.0)
    value += tl.load(offset + source, mask=source < CHANNELS, other=0.0)
    value = tl.where(here, value, 0.0)
    to = (image.to(tl.int64) * pixels + pixel[:, None]) * stored + channel[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & (channel < stored)[None, :])


def folded_channels(fold: int, channels: int) -> int:
    """How many channels a folded map has: filled up to a multiple of eight, which tensor cores want."""
    return -(-fold * fold * channels // 8) * 8


@dataclass(frozen=True, kw_only=True)
class Taker:
    """Samples (count, H, W, C) and labels on the device, the order of an epoch, and how a batch is made of them.

    `key` gets the key of the batch. `factor` and `offset`: one affine map per channel. `size`: height and width after the crop;
    `pad` as in `AugmentConfig`. `fold`: the side of squares that become channels, behind a `border` of zeros, for a convolution of
    so large a `kernel`; 0 for a plain map.
    """

    images: torch.Tensor
    labels: torch.Tensor
    order: torch.Tensor
    key: torch.Tensor
    factor: torch.Tensor
    offset: torch.Tensor
    size: tuple[int, int]
    pad: int = 0
    flip: bool = False
    fold: int = 0
    border: int = 0
    kernel: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what is made."""
        channels = self.images.shape[3]
        if not self.fold:
            return *self.size, channels
        behind = -(-self.kernel // self.fold) - 1  # what the folded kernel reaches beyond its place
        height, width = ((side + 2 * self.border - self.kernel) // self.fold + 1 + behind for side in self.size)
        return height, width, folded_channels(self.fold, channels)

    def take(self, places: torch.Tensor, cursor: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of `count` samples at row `cursor` of `places` (begin, key): maps (n, C, H, W), channels-last, and labels."""
        height, width, wide = self.shape
        out = torch.empty((count, height, width, wide), dtype=dtype, device=self.images.device)
        labels = torch.empty(count, dtype=self.labels.dtype, device=self.images.device)
        _, from_height, from_width, channels = self.images.shape
        moves = self.pad > 0 or self.size != (from_height, from_width)
        block = max(16, 2048 // triton.next_power_of_2(wide))
        take_kernel[(count, triton.cdiv(height * width, block))](
            *(self.images, self.labels, self.order, places, cursor, out, labels, self.key, self.factor, self.offset),
            *(from_height, from_width, *self.size, self.pad, height * width, width, wide),
            *(channels, triton.next_power_of_2(wide), moves, self.flip, self.fold, self.border, block),
        )
        return out.permute(0, 3, 1, 2), labels
