"""What runs on the device for `thin`, which explains the passes: gathering taps, products of matrices, sums in a fixed order."""

from typing import Final

import triton
import triton.language as tl

from deepex.step.captured.kernels.division import tile

INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def multiply(a, b, total):
    """Add a · b to the total. The interpreter takes bf16 for whole numbers, so it is given float32: products are exact anyway.

    Float32 goes to the tensor cores as two parts of each factor, in three products, because they drop the bits that one has no room
    for: nearly float32's precision, and no slower, as memory sets the pace.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _taps(
    maps,
    row,
    end,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    MARGIN: tl.constexpr,
    FLIPS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """What the window around each row covers in a thin map, rows × taps (thin channel, line, column); zero outside.

    The rows are the thin map's pixels, less MARGIN of them at each edge: the centres of windows that need less padding.
    """
    tap = tl.arange(0, TAPS)
    thin = tap // (SIDE * SIDE)
    down = tap % (SIDE * SIDE) // SIDE - SIDE // 2
    right = tap % SIDE - SIDE // 2
    if FLIPS:
        down = -down
        right = -right
    LINES: tl.constexpr = HEIGHT - 2 * MARGIN
    COLUMNS: tl.constexpr = WIDTH - 2 * MARGIN
    line = row // COLUMNS % LINES + MARGIN
    column = row % COLUMNS + MARGIN
    pixel = row
    if MARGIN > 0:
        pixel = (row // (LINES * COLUMNS) * HEIGHT + line) * WIDTH + column
    y = line[:, None] + down[None, :]
    x = column[:, None] + right[None, :]
    inside = (row < end)[:, None] & (tap < THIN * SIDE * SIDE)[None, :]
    inside = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    at = (pixel * THIN)[:, None] + ((down * WIDTH + right) * THIN + thin)[None, :]  # a thin map has fewer than 2³¹ elements
    return tl.load(maps + at, mask=inside, other=0.0)


@triton.jit
def _word_places(row, end):
    """Where the bits of these rows are, for the program's block of channels: bit k of word j is that of channel 8·k + j.

    So the bits of a word are in one thread's hands: those of a product's columns, as tensor cores leave them.
    """
    at = row.to(tl.int64)[:, None] * (8 * tl.num_programs(1)) + tl.program_id(1) * 8 + tl.arange(0, 8)[None, :]
    return at, (row < end)[:, None]


@triton.jit
def thin_input_kernel(
    images,
    weight,
    bias,
    out,
    passed,
    num_rows,
    rows_each,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    MARGIN: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < NUM_CHANNELS
    tap = tl.arange(0, TAPS)
    there = (tap < THIN * SIDE * SIDE)[:, None] & known[None, :]
    kernel = tl.load(weight + channel[None, :] * (THIN * SIDE * SIDE) + tap[:, None], mask=there, other=0.0)
    kernel = kernel.to(images.dtype.element_ty)
    if BIAS:
        shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    row = begin + tl.arange(0, ROWS)
    covered = _taps(images, row, end, HEIGHT, WIDTH, THIN, SIDE, MARGIN, False, TAPS)
    for _ in range(begin, end, ROWS):
        # the next rows are on their way while these are multiplied and written
        following = _taps(images, row + ROWS, end, HEIGHT, WIDTH, THIN, SIDE, MARGIN, False, TAPS)
        value = multiply(covered, kernel, tl.zeros((ROWS, CHANNELS), tl.float32))
        if BIAS:
            value += shift[None, :]
        if RELU:
            value = tl.maximum(value, 0.0)
            word_at, held = _word_places(row, end)
            bit = tl.reshape((value > 0.0).to(tl.int32), (ROWS, CHANNELS // 8, 8)) << tl.arange(0, CHANNELS // 8)[None, :, None]
            tl.store(passed + word_at, tl.sum(bit, 1).to(passed.dtype.element_ty), mask=held)
        at, inside = tile(row, channel, end, NUM_CHANNELS)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        covered = following
        row += ROWS


@triton.jit
def thin_input_gradient_kernel(
    g,
    passed,
    images,
    partial,
    num_rows,
    rows_each,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    MARGIN: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    MASKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Channels × taps of the weight's gradient; one tap more that is always 1 makes its column the bias's gradient."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < NUM_CHANNELS
    tap = tl.arange(0, TAPS)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    total = tl.zeros((CHANNELS, TAPS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, channel, end, NUM_CHANNELS)
        value = tl.load(g + at, mask=inside, other=0.0)
        if MASKS:
            word_at, held = _word_places(row, end)
            word = tl.load(passed + word_at, mask=held, other=0).to(tl.int32)
            bit = (word[:, None, :] >> tl.arange(0, CHANNELS // 8)[None, :, None]) & 1
            value = tl.where(tl.reshape(bit, (ROWS, CHANNELS)) == 1, value, 0.0)
        covered = _taps(images, row, end, HEIGHT, WIDTH, THIN, SIDE, MARGIN, False, TAPS).to(g.dtype.element_ty)
        covered = tl.where((tap == THIN * SIDE * SIDE)[None, :], 1.0, covered).to(g.dtype.element_ty)
        total = multiply(tl.trans(value), covered, total)
    place = partial + tl.program_id(0).to(tl.int64) * NUM_CHANNELS * TAPS
    tl.store(place + channel[:, None] * TAPS + tap[None, :], total, mask=known[:, None])


@triton.jit
def thin_output_kernel(
    x,
    weight,
    bias,
    out,
    scratch,
    num_bands,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    LINES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Band after band of an image's lines: the product with x into the program's own scratch, then the sums over the window.

    The scratch is written again for each band, so it lives in the cache. Lines within half a window of a band are computed twice.
    """
    AREA: tl.constexpr = SIDE * SIDE
    HALF: tl.constexpr = SIDE // 2
    SPAN: tl.constexpr = (LINES + 2 * HALF) * WIDTH
    BANDS: tl.constexpr = (HEIGHT + LINES - 1) // LINES
    BLOCKS: tl.constexpr = (NUM_CHANNELS + CHANNELS - 1) // CHANNELS
    tap = tl.arange(0, TAPS)
    real = tap < THIN * AREA
    # (channels, thin, side, side) if transposed, else (thin, channels, side, side)
    STRIDE: tl.constexpr = THIN * AREA if TRANSPOSED else AREA
    tap_at = tap if TRANSPOSED else tap // AREA * (NUM_CHANNELS * AREA) + tap % AREA
    own = scratch + tl.program_id(0).to(tl.int64) * (THIN * AREA * SPAN)
    channel = tl.arange(0, CHANNELS)
    if BLOCKS == 1:
        there = (channel < NUM_CHANNELS)[:, None] & real[None, :]
        kernel = tl.load(weight + channel[:, None] * STRIDE + tap_at[None, :], mask=there, other=0.0)
        kernel = kernel.to(x.dtype.element_ty)
    for band in range(tl.program_id(0), num_bands, tl.num_programs(0)):
        image = band // BANDS * (HEIGHT * WIDTH)
        top = band % BANDS * LINES
        bottom = tl.minimum(top + LINES, HEIGHT)
        begin = tl.maximum(top - HALF, 0) * WIDTH
        end = tl.minimum(bottom + HALF, HEIGHT) * WIDTH
        for first in range(begin, end, ROWS):
            pixel = first + tl.arange(0, ROWS)
            at = (image + pixel).to(tl.int64)[:, None] * NUM_CHANNELS
            here = (pixel < end)[:, None]
            value = tl.zeros((ROWS, TAPS), tl.float32)
            if BLOCKS == 1:
                inside = here & (channel < NUM_CHANNELS)[None, :]
                value = multiply(tl.load(x + at + channel[None, :], mask=inside, other=0.0), kernel, value)
            else:
                for block in range(BLOCKS):  # not unrolled: all blocks at once are too much for the shared memory
                    wide = block * CHANNELS + channel
                    some = tl.load(x + at + wide[None, :], mask=here & (wide < NUM_CHANNELS)[None, :], other=0.0)
                    there = (wide < NUM_CHANNELS)[:, None] & real[None, :]
                    part = tl.load(weight + wide[:, None] * STRIDE + tap_at[None, :], mask=there, other=0.0)
                    value = multiply(some, part.to(x.dtype.element_ty), value)
            kept = (pixel < end)[:, None] & real[None, :]
            tl.store(own + tap[None, :] * SPAN + (pixel - begin)[:, None], value, mask=kept)
        tl.debug_barrier()
        for first in range(top * WIDTH, bottom * WIDTH, 4 * ROWS):
            pixel = first + tl.arange(0, 4 * ROWS)
            line = pixel // WIDTH
            column = pixel % WIDTH
            for thin in tl.static_range(THIN):
                total = tl.zeros((4 * ROWS,), tl.float32)
                if BIAS:
                    total += tl.load(bias + thin).to(tl.float32)
                for which in tl.static_range(AREA):
                    down = HALF - which // SIDE if TRANSPOSED else which // SIDE - HALF
                    right = HALF - which % SIDE if TRANSPOSED else which % SIDE - HALF
                    inside = (line < bottom) & (line + down >= 0) & (line + down < HEIGHT)
                    inside = inside & (column + right >= 0) & (column + right < WIDTH)
                    at = (thin * AREA + which) * SPAN + pixel + (down * WIDTH + right) - begin
                    total += tl.load(own + at, mask=inside, other=0.0)
                tl.store(out + (image + pixel).to(tl.int64) * THIN + thin, total.to(out.dtype.element_ty), mask=line < bottom)
        tl.debug_barrier()


@triton.jit
def thin_output_gradient_kernel(
    dout,
    x,
    weight,
    dx,
    partial,
    num_rows,
    rows_each,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The wide map's gradient; and in `partial` channels × taps of the weight's, the taps' own sums, and the sums of dx."""
    AREA: tl.constexpr = SIDE * SIDE
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < NUM_CHANNELS
    tap = tl.arange(0, TAPS)
    if TRANSPOSED:
        weight_at = channel[None, :] * (THIN * AREA) + tap[:, None]
    else:
        weight_at = (tap // AREA * (NUM_CHANNELS * AREA) + tap % AREA)[:, None] + channel[None, :] * AREA
    kernel = tl.load(weight + weight_at, mask=(tap < THIN * AREA)[:, None] & known[None, :], other=0.0).to(x.dtype.element_ty)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    weight_total = tl.zeros((CHANNELS, TAPS), tl.float32)
    tap_total = tl.zeros((ROWS, TAPS), tl.float32)
    if MASKS:
        dx_total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, channel, end, NUM_CHANNELS)
        value = tl.load(x + at, mask=inside, other=0.0)
        covered = _taps(dout, row, end, HEIGHT, WIDTH, THIN, SIDE, 0, not TRANSPOSED, TAPS)
        tap_total += covered.to(tl.float32)
        covered = covered.to(x.dtype.element_ty)
        d = multiply(covered, kernel, tl.zeros((ROWS, CHANNELS), tl.float32))
        weight_total = multiply(tl.trans(value), covered, weight_total)
        if MASKS:
            d = tl.where(value.to(tl.float32) > 0.0, d, 0.0)
            dx_total += d
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    place = partial + tl.program_id(0).to(tl.int64) * (NUM_CHANNELS * TAPS + TAPS + (NUM_CHANNELS if MASKS else 0))
    tl.store(place + channel[:, None] * TAPS + tap[None, :], weight_total, mask=known[:, None])
    place += NUM_CHANNELS * TAPS
    if tl.program_id(1) == 0:
        tl.store(place + tap, tl.sum(tap_total, 0))
    if MASKS:
        tl.store(place + TAPS + channel, tl.sum(dx_total, 0), mask=known)


@triton.jit
def finish_kernel(
    partial,
    weight_grad,
    thin_sums,
    wide_sums,
    num_parts,
    size,
    THIN: tl.constexpr,
    SIDE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    THIN_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    INPUT: tl.constexpr,  # of a thin input: the wide sums are in the tap after the last
    SUMS: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what the programs found, and put it where the weight's layout has it."""
    AREA: tl.constexpr = SIDE * SIDE
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, num_parts, PARTS):
        other = first + tl.arange(0, PARTS)
        there = (other < num_parts)[:, None] & (at < size)[None, :]
        summed += tl.load(partial + other.to(tl.int64)[:, None] * size + at[None, :], mask=there, other=0.0)
    total = tl.sum(summed, 0)
    channel = at // TAPS
    tap = at % TAPS
    weights = at < NUM_CHANNELS * TAPS
    place = tap // AREA * THIN_STRIDE + tap % AREA + channel * CHANNEL_STRIDE
    tl.store(weight_grad + place, total, mask=weights & (tap < THIN * AREA))
    if INPUT:
        tl.store(wide_sums + channel, total, mask=weights & (tap == THIN * AREA))
    else:
        # the window's centre meets every element of the thin map once
        centre = (channel == NUM_CHANNELS) & (tap % AREA == AREA // 2) & (tap < THIN * AREA) & (at < size)
        tl.store(thin_sums + tap // AREA, total, mask=centre)
        if SUMS:
            wide = at - NUM_CHANNELS * TAPS - TAPS
            tl.store(wide_sums + wide, total, mask=(wide >= 0) & (at < size))
