"""Batch norm in training, with what follows it, over channels-last maps: two passes forward, two backward, nothing else in memory.

    statistics_kernel        mean and variance per channel, and the running averages
    apply_kernel             relu(norm(y) + shortcut)
    gradient_sums_kernel     the gradients of scale and shift, and what the next needs
    gradient_kernel          the gradient of y
    small_kernel, small_gradient_kernel: the same in one launch each, for maps of so few rows that a program can hold them all

A map (n, channels, height, width) in channels-last order is a matrix of `rows` × `channels`. Each program of a pass that reduces
takes some rows of some channels and writes what it found; a small kernel behind it adds that up, in a fixed order, so that the bits
are the same in every run. (The program that arrives last could do that, but would hold the registers for it all the time: measured
at half the speed.) Variances are merged from the programs' own means (Chan et al. 1983), and each program's mean is taken from its
first row, so that nothing cancels.
`saved` has four rows: mean, 1/deviation, and scale and shift of norm(y) = scale·y + shift. The kernels compute in float32, whatever
the maps are made of.
"""

import triton
import triton.language as tl

from deepex.step.captured.kernels.division import tile


@triton.jit
def statistics_kernel(
    y, partial, num_rows, num_channels, rows_each, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Each program's mean and sum of squares around it."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    pivot = tl.load(y + begin.to(tl.int64) * num_channels + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, channel, end, num_channels)
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        total += value
        squares += value * value
    count = (end - begin).to(tl.float32)
    offset = tl.sum(total, 0) / count
    place = partial + part * 2 * num_channels + channel
    tl.store(place, pivot + offset, mask=known)
    tl.store(place + num_channels, tl.sum(squares, 0) - count * offset * offset, mask=known)


@triton.jit
def finish_statistics_kernel(
    partial, gamma, beta, saved, running_mean, running_variance, num_rows, num_channels, rows_each, num_parts, eps, momentum,
    TRACKS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge what the programs found, around the first one's mean."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    rows = num_rows * 1.0
    held = _parameters(gamma, beta, running_mean, running_variance, channel, known, TRACKS)
    middle = tl.load(partial + channel, mask=known, other=0.0)
    summed = tl.zeros((PARTS, CHANNELS), tl.float32)
    spread = tl.zeros((PARTS, CHANNELS), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < num_parts)[:, None] & known[None, :]
        size = (tl.minimum((part + 1) * rows_each, num_rows) - part * rows_each).to(tl.float32)
        at = partial + part[:, None] * 2 * num_channels + channel[None, :]
        apart = tl.load(at, mask=there, other=0.0) - middle[None, :]
        within = tl.load(at + num_channels, mask=there, other=0.0)
        summed += tl.where(there, size[:, None] * apart, 0.0)
        spread += tl.where(there, within + size[:, None] * apart * apart, 0.0)
    beside = tl.sum(summed, 0) / rows
    sum_squares = tl.maximum(tl.sum(spread, 0) - rows * beside * beside, 0.0)
    _finish_statistics(
        middle + beside, sum_squares, held, saved, running_mean, running_variance, channel, known, num_channels, rows, eps,
        momentum, TRACKS,
    )  # fmt: skip


@triton.jit
def _parameters(gamma, beta, running_mean, running_variance, channel, known, TRACKS: tl.constexpr):
    """What a norm has of its channels; read early, so that nobody waits for it behind the sums."""
    weight = tl.load(gamma + channel, mask=known, other=1.0).to(tl.float32)
    bias = tl.load(beta + channel, mask=known, other=0.0).to(tl.float32)
    mean, variance = bias, bias
    if TRACKS:
        mean = tl.load(running_mean + channel, mask=known, other=0.0)
        variance = tl.load(running_variance + channel, mask=known, other=0.0)
    return weight, bias, mean, variance


@triton.jit
def _finish_statistics(
    mean, sum_squares, held, saved, running_mean, running_variance, channel, known, num_channels, rows, eps, momentum,
    TRACKS: tl.constexpr,
):  # fmt: skip
    """Keep mean, 1/deviation, and norm(y) = scale·y + shift; move the running averages."""
    weight, bias, old_mean, old_variance = held
    rstd = 1.0 / tl.sqrt(sum_squares / rows + eps)
    scale = weight * rstd
    shift = bias - mean * scale
    tl.store(saved + channel, mean, mask=known)
    tl.store(saved + num_channels + channel, rstd, mask=known)
    tl.store(saved + 2 * num_channels + channel, scale, mask=known)
    tl.store(saved + 3 * num_channels + channel, shift, mask=known)
    if TRACKS:
        unbiased = sum_squares / tl.maximum(rows - 1.0, 1.0)
        tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=known)
        tl.store(running_variance + channel, old_variance + momentum * (unbiased - old_variance), mask=known)
    return scale, shift


@triton.jit
def _normed(y, saved, channel, known, inside, at, num_channels):
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(saved + 2 * num_channels + channel, mask=known, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=known, other=0.0)
    return value * scale[None, :] + shift[None, :]


@triton.jit
def apply_kernel(
    y, saved, shortcut, saved2, out, num_rows, num_channels,
    SHORTCUT: tl.constexpr,  # 0: none, 1: as it is, 2: through a norm of its own
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Each program one tile, the last rows first: they are in the cache still."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    at, inside = tile(row, channel, num_rows, num_channels)
    value = _normed(y, saved, channel, known, inside, at, num_channels)
    if SHORTCUT == 1:
        value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    if SHORTCUT == 2:
        value += _normed(shortcut, saved2, channel, known, inside, at, num_channels)
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a NaN is seen, not lost
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _incoming(g, g2, z, value, scale, shift, inside, at, TWO: tl.constexpr, MASK: tl.constexpr):
    """The gradient behind the ReLU."""
    d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        d += tl.load(g2 + at, mask=inside, other=0.0).to(tl.float32)
    if MASK == 1:
        d = tl.where(value * scale[None, :] + shift[None, :] > 0.0, d, 0.0)
    if MASK == 2:
        d = tl.where(tl.load(z + at, mask=inside, other=0.0) > 0.0, d, 0.0)
    return d


@triton.jit
def gradient_sums_kernel(
    g, g2, y, y2, z, d_out, partial, saved, saved2, num_rows, num_channels, rows_each,
    TWO: tl.constexpr,  # whether there are two gradients, to be added
    MASK: tl.constexpr,  # 0: no ReLU, 1: its sign is that of norm(y), 2: that of z
    NORMS: tl.constexpr, WRITES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient d behind the ReLU, and of d·(y − mean)."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    mean = tl.load(saved + channel, mask=known, other=0.0)
    scale = tl.load(saved + 2 * num_channels + channel, mask=known, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=known, other=0.0)
    if NORMS == 2:
        mean2 = tl.load(saved2 + channel, mask=known, other=0.0)
        along2 = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    along = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = tile(row, channel, end, num_channels)
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        d = _incoming(g, g2, z, value, scale, shift, inside, at, TWO, MASK)
        if WRITES:
            rounded = d.to(d_out.dtype.element_ty)
            tl.store(d_out + at, rounded, mask=inside)
            d = rounded.to(tl.float32)
        total += d
        along += d * (value - mean[None, :])
        if NORMS == 2:
            along2 += d * (tl.load(y2 + at, mask=inside, other=0.0).to(tl.float32) - mean2[None, :])
    place = partial + part * (NORMS + 1) * num_channels + channel
    tl.store(place, tl.sum(total, 0), mask=known)
    tl.store(place + num_channels, tl.sum(along, 0), mask=known)
    if NORMS == 2:
        tl.store(place + 2 * num_channels, tl.sum(along2, 0), mask=known)


@triton.jit
def finish_gradient_kernel(
    partial, gamma, saved, gamma2, saved2, grads, factors, num_rows, num_channels, num_parts,
    NORMS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    rows = num_rows * 1.0
    held = _held(gamma, saved, channel, known, num_channels)
    if NORMS == 2:
        held2 = _held(gamma2, saved2, channel, known, num_channels)
    all_d = tl.zeros((PARTS, CHANNELS), tl.float32)
    all_y = tl.zeros((PARTS, CHANNELS), tl.float32)
    all_y2 = tl.zeros((PARTS, CHANNELS), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < num_parts)[:, None] & known[None, :]
        at = partial + part[:, None] * (NORMS + 1) * num_channels + channel[None, :]
        all_d += tl.load(at, mask=there, other=0.0)
        all_y += tl.load(at + num_channels, mask=there, other=0.0)
        if NORMS == 2:
            all_y2 += tl.load(at + 2 * num_channels, mask=there, other=0.0)
    d_sum = tl.sum(all_d, 0)
    _finish_gradient(d_sum, tl.sum(all_y, 0), held, grads, factors, channel, known, num_channels, rows)
    if NORMS == 2:
        grads2, factors2 = grads + 2 * num_channels, factors + 3 * num_channels
        _finish_gradient(d_sum, tl.sum(all_y2, 0), held2, grads2, factors2, channel, known, num_channels, rows)


@triton.jit
def _held(gamma, saved, channel, known, num_channels):
    """Mean, 1/deviation and weight of a norm's channels; read early, as above."""
    mean = tl.load(saved + channel, mask=known, other=0.0)
    rstd = tl.load(saved + num_channels + channel, mask=known, other=0.0)
    return mean, rstd, tl.load(gamma + channel, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _finish_gradient(d_sum, along, held, grads, factors, channel, known, num_channels, rows):
    """Gradients of scale and shift in `grads`; and dy = factors[0]·d + factors[1]·y + factors[2]."""
    mean, rstd, weight = held
    scale = weight * rstd
    tl.store(grads + channel, along * rstd, mask=known)
    tl.store(grads + num_channels + channel, d_sum, mask=known)
    slope = -scale * rstd * rstd * along / rows
    constant = -scale * d_sum / rows - slope * mean
    tl.store(factors + channel, scale, mask=known)
    tl.store(factors + num_channels + channel, slope, mask=known)
    tl.store(factors + 2 * num_channels + channel, constant, mask=known)
    return scale, slope, constant


@triton.jit
def gradient_kernel(
    d, y, y2, saved, factors, dy, dy2, num_rows, num_channels,
    MASK: tl.constexpr,  # 0: d is behind the ReLU already, 1: before it, and its sign is that of norm(y)
    NORMS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    at, inside = tile(row, channel, num_rows, num_channels)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(saved + 2 * num_channels + channel, mask=known, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=known, other=0.0)
    gradient = _incoming(d, d, d, value, scale, shift, inside, at, False, MASK)
    _store_gradient(gradient, value, factors, dy, channel, known, inside, at, num_channels)
    if NORMS == 2:
        value = tl.load(y2 + at, mask=inside, other=0.0).to(tl.float32)
        _store_gradient(gradient, value, factors + 3 * num_channels, dy2, channel, known, inside, at, num_channels)


@triton.jit
def _store_gradient(gradient, value, factors, dy, channel, known, inside, at, num_channels):
    f0 = tl.load(factors + channel, mask=known, other=0.0)
    f1 = tl.load(factors + num_channels + channel, mask=known, other=0.0)
    f2 = tl.load(factors + 2 * num_channels + channel, mask=known, other=0.0)
    result = f0[None, :] * gradient + f1[None, :] * value + f2[None, :]
    tl.store(dy + at, result.to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _moments(
    value, gamma, beta, saved, running_mean, running_variance, channel, known, inside, num_channels, rows, eps, momentum,
    TRACKS: tl.constexpr,
):  # fmt: skip
    """norm(y), with all rows at hand: the mean first, then the deviations from it."""
    held = _parameters(gamma, beta, running_mean, running_variance, channel, known, TRACKS)
    mean = tl.sum(value, 0) / rows
    apart = tl.where(inside, value - mean[None, :], 0.0)
    scale, shift = _finish_statistics(
        mean, tl.sum(apart * apart, 0), held, saved, running_mean, running_variance, channel, known, num_channels, rows, eps,
        momentum, TRACKS,
    )  # fmt: skip
    return value * scale[None, :] + shift[None, :]


@triton.jit
def small_kernel(
    y, gamma, beta, saved, running_mean, running_variance, shortcut, gamma2, beta2, saved2, running_mean2, running_variance2, out,
    num_rows, num_channels, eps, momentum, eps2, momentum2,
    TRACKS: tl.constexpr, TRACKS2: tl.constexpr, SHORTCUT: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    inside = (row < num_rows)[:, None] & known[None, :]
    at = row[:, None] * num_channels + channel[None, :]
    rows = num_rows * 1.0
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if SHORTCUT > 0:  # on its way while the sums are made
        other = tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    value = _moments(
        value, gamma, beta, saved, running_mean, running_variance, channel, known, inside, num_channels, rows, eps, momentum, TRACKS
    )
    if SHORTCUT == 1:
        value += other
    if SHORTCUT == 2:
        value += _moments(
            other, gamma2, beta2, saved2, running_mean2, running_variance2, channel, known, inside, num_channels, rows, eps2,
            momentum2, TRACKS2,
        )  # fmt: skip
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a NaN is seen, not lost
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def small_gradient_kernel(
    g, g2, y, y2, z, d_out, gamma, saved, gamma2, saved2, grads, factors, dy, dy2, num_rows, num_channels,
    TWO: tl.constexpr, MASK: tl.constexpr, NORMS: tl.constexpr, WRITES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    inside = (row < num_rows)[:, None] & known[None, :]
    at = row[:, None] * num_channels + channel[None, :]
    rows = num_rows * 1.0
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    held = _held(gamma, saved, channel, known, num_channels)
    scale = tl.load(saved + 2 * num_channels + channel, mask=known, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=known, other=0.0)
    if NORMS == 2:  # on their way while the sums are made
        value2 = tl.load(y2 + at, mask=inside, other=0.0).to(tl.float32)
        held2 = _held(gamma2, saved2, channel, known, num_channels)
    d = _incoming(g, g2, z, value, scale, shift, inside, at, TWO, MASK)
    if WRITES:
        rounded = d.to(d_out.dtype.element_ty)
        tl.store(d_out + at, rounded, mask=inside)
        d = rounded.to(tl.float32)
    d_sum = tl.sum(d, 0)
    along = tl.sum(d * (value - held[0][None, :]), 0)
    f0, f1, f2 = _finish_gradient(d_sum, along, held, grads, factors, channel, known, num_channels, rows)
    result = f0[None, :] * d + f1[None, :] * value + f2[None, :]
    tl.store(dy + at, result.to(dy.dtype.element_ty), mask=inside)
    if NORMS == 2:
        along = tl.sum(d * (value2 - held2[0][None, :]), 0)
        f0, f1, f2 = _finish_gradient(
            d_sum, along, held2, grads + 2 * num_channels, factors + 3 * num_channels, channel, known, num_channels, rows
        )
        result = f0[None, :] * d + f1[None, :] * value2 + f2[None, :]
        tl.store(dy2 + at, result.to(dy2.dtype.element_ty), mask=inside)
