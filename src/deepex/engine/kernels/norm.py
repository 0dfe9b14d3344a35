"""Batch norm in training, with what follows it, over channels-last maps: two passes forward, two backward, nothing else in memory.

    statistics(y, norm, …)              # one pass: mean and variance per channel, and the running averages
    apply(y, …, shortcut=x, relu=True)  # one pass: relu(norm(y) + x)

A map (n, channels, height, width) in channels-last order is a matrix of `rows` × `channels`. Each program of a pass that reduces
takes some rows of some channels and writes what it found; the one that arrives last at a block of channels adds that up, in a fixed
order, so that the bits are the same in every run. Variances are merged from the programs' own means (Chan et al. 1983), and each
program's mean is taken from its first row, so that nothing cancels.
The kernels compute in float32, whatever the maps are made of.
"""

import triton
import triton.language as tl


@triton.jit
def statistics_kernel(
    y,
    partial,
    arrivals,
    gamma,
    beta,
    mean_out,
    rstd_out,
    scale_out,
    shift_out,
    running_mean,
    running_variance,
    num_rows,
    num_channels,
    rows_each,
    num_parts,
    eps,
    momentum,
    TRACKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
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
        inside = (row < end)[:, None] & known[None, :]
        value = tl.load(y + row.to(tl.int64)[:, None] * num_channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        total += value
        squares += value * value
    count = (end - begin).to(tl.float32)
    offset = tl.sum(total, 0) / count
    place = partial + part * 2 * num_channels + channel
    tl.store(place, pivot + offset, mask=known)
    tl.store(place + num_channels, tl.sum(squares, 0) - count * offset * offset, mask=known)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tl.program_id(1), 1, sem="acq_rel")
    if arrived == num_parts - 1:
        tl.store(arrivals + tl.program_id(1), 0)
        rows = num_rows.to(tl.float32)
        summed = tl.zeros((PARTS, CHANNELS), tl.float32)
        for first in range(0, num_parts, PARTS):
            other = first + tl.arange(0, PARTS)
            there = (other < num_parts)[:, None] & known[None, :]
            size = tl.minimum((other + 1) * rows_each, num_rows) - other * rows_each
            means = tl.load(partial + other[:, None] * 2 * num_channels + channel[None, :], mask=there, other=0.0)
            summed += tl.where(there, means * size[:, None].to(tl.float32), 0.0)
        mean = tl.sum(summed, 0) / rows
        spread = tl.zeros((PARTS, CHANNELS), tl.float32)
        for first in range(0, num_parts, PARTS):
            other = first + tl.arange(0, PARTS)
            there = (other < num_parts)[:, None] & known[None, :]
            size = tl.minimum((other + 1) * rows_each, num_rows) - other * rows_each
            at = partial + other[:, None] * 2 * num_channels + channel[None, :]
            apart = tl.load(at, mask=there, other=0.0) - mean[None, :]
            within = tl.load(at + num_channels, mask=there, other=0.0)
            spread += tl.where(there, within + size[:, None].to(tl.float32) * apart * apart, 0.0)
        sum_squares = tl.sum(spread, 0)
        rstd = 1.0 / tl.sqrt(sum_squares / rows + eps)
        scale = tl.load(gamma + channel, mask=known, other=1.0).to(tl.float32) * rstd
        shift = tl.load(beta + channel, mask=known, other=0.0).to(tl.float32) - mean * scale
        tl.store(mean_out + channel, mean, mask=known)
        tl.store(rstd_out + channel, rstd, mask=known)
        tl.store(scale_out + channel, scale, mask=known)
        tl.store(shift_out + channel, shift, mask=known)
        if TRACKS:
            old = tl.load(running_mean + channel, mask=known, other=0.0)
            tl.store(running_mean + channel, old + momentum * (mean - old), mask=known)
            old = tl.load(running_variance + channel, mask=known, other=0.0)
            unbiased = sum_squares / tl.maximum(rows - 1.0, 1.0)
            tl.store(running_variance + channel, old + momentum * (unbiased - old), mask=known)


@triton.jit
def apply_kernel(
    y,
    scale,
    shift,
    shortcut,
    scale2,
    shift2,
    out,
    num_rows,
    num_channels,
    SHORTCUT: tl.constexpr,  # 0: none, 1: as it is, 2: through a norm of its own
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Each program one tile, the last rows first: they are in the cache still."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    inside = (row < num_rows)[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
    a = tl.load(scale + channel, mask=known, other=0.0)
    b = tl.load(shift + channel, mask=known, other=0.0)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if SHORTCUT == 1:
        value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    if SHORTCUT == 2:
        a2 = tl.load(scale2 + channel, mask=known, other=0.0)
        b2 = tl.load(shift2 + channel, mask=known, other=0.0)
        value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32) * a2[None, :] + b2[None, :]
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gradient_sums_kernel(
    g,
    g2,
    y,
    y2,
    z,
    d_out,
    partial,
    arrivals,
    gamma,
    mean,
    rstd,
    scale,
    shift,
    gamma2,
    mean2,
    rstd2,
    gamma_grad,
    beta_grad,
    gamma_grad2,
    beta_grad2,
    factors,
    num_rows,
    num_channels,
    rows_each,
    num_parts,
    TWO: tl.constexpr,  # gradients to be added
    MASK: tl.constexpr,  # 0: none, 1: the sign of norm(y), 2: the sign of z
    NORMS: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sums of the gradient d behind the ReLU, and of d·(y − mean): what the gradients of norm's input, scale and shift need."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    m = tl.load(mean + channel, mask=known, other=0.0)
    if MASK == 1:
        a = tl.load(scale + channel, mask=known, other=0.0)
        b = tl.load(shift + channel, mask=known, other=0.0)
    if NORMS == 2:
        m2 = tl.load(mean2 + channel, mask=known, other=0.0)
        sum_y2 = tl.zeros((ROWS, CHANNELS), tl.float32)
    sum_d = tl.zeros((ROWS, CHANNELS), tl.float32)
    sum_y = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
        d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            d += tl.load(g2 + at, mask=inside, other=0.0).to(tl.float32)
        if MASK == 1:
            d = tl.where(value * a[None, :] + b[None, :] > 0.0, d, 0.0)
        if MASK == 2:
            d = tl.where(tl.load(z + at, mask=inside, other=0.0) > 0.0, d, 0.0)
        if WRITES:
            d = d.to(d_out.dtype.element_ty)
            tl.store(d_out + at, d, mask=inside)
            d = d.to(tl.float32)
        sum_d += d
        sum_y += d * (value - m[None, :])
        if NORMS == 2:
            sum_y2 += d * (tl.load(y2 + at, mask=inside, other=0.0).to(tl.float32) - m2[None, :])
    place = partial + part * (NORMS + 1) * num_channels + channel
    tl.store(place, tl.sum(sum_d, 0), mask=known)
    tl.store(place + num_channels, tl.sum(sum_y, 0), mask=known)
    if NORMS == 2:
        tl.store(place + 2 * num_channels, tl.sum(sum_y2, 0), mask=known)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tl.program_id(1), 1, sem="acq_rel")
    if arrived == num_parts - 1:
        tl.store(arrivals + tl.program_id(1), 0)
        rows = num_rows.to(tl.float32)
        total = tl.zeros((PARTS, CHANNELS), tl.float32)
        along = tl.zeros((PARTS, CHANNELS), tl.float32)
        along2 = tl.zeros((PARTS, CHANNELS), tl.float32)
        for first in range(0, num_parts, PARTS):
            other = first + tl.arange(0, PARTS)
            there = (other < num_parts)[:, None] & known[None, :]
            at = partial + other[:, None] * (NORMS + 1) * num_channels + channel[None, :]
            total += tl.load(at, mask=there, other=0.0)
            along += tl.load(at + num_channels, mask=there, other=0.0)
            if NORMS == 2:
                along2 += tl.load(at + 2 * num_channels, mask=there, other=0.0)
        d_sum = tl.sum(total, 0)
        _finish_norm(
            d_sum, tl.sum(along, 0), gamma, mean, rstd, gamma_grad, beta_grad, factors, channel, known, num_channels, rows
        )
        if NORMS == 2:
            _finish_norm(
                d_sum,
                tl.sum(along2, 0),
                gamma2,
                mean2,
                rstd2,
                gamma_grad2,
                beta_grad2,
                factors + 3 * num_channels,
                channel,
                known,
                num_channels,
                rows,
            )


@triton.jit
def _finish_norm(d_sum, along, gamma, mean, rstd, gamma_grad, beta_grad, factors, channel, known, num_channels, rows):
    """Gradients of scale and shift, and dy = factors[0]·d + factors[1]·y + factors[2]."""
    r = tl.load(rstd + channel, mask=known, other=0.0)
    m = tl.load(mean + channel, mask=known, other=0.0)
    a = tl.load(gamma + channel, mask=known, other=0.0).to(tl.float32) * r
    tl.store(gamma_grad + channel, along * r, mask=known)
    tl.store(beta_grad + channel, d_sum, mask=known)
    slope = -a * r * r * along / rows
    tl.store(factors + channel, a, mask=known)
    tl.store(factors + num_channels + channel, slope, mask=known)
    tl.store(factors + 2 * num_channels + channel, -a * d_sum / rows - slope * m, mask=known)


@triton.jit
def gradient_kernel(
    d,
    y,
    y2,
    scale,
    shift,
    factors,
    dy,
    dy2,
    num_rows,
    num_channels,
    MASK: tl.constexpr,  # 0: d is masked already, 1: by the sign of norm(y)
    NORMS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < num_channels
    inside = (row < num_rows)[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
    gradient = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if MASK == 1:
        a = tl.load(scale + channel, mask=known, other=0.0)
        b = tl.load(shift + channel, mask=known, other=0.0)
        gradient = tl.where(value * a[None, :] + b[None, :] > 0.0, gradient, 0.0)
    f = factors + channel
    f0 = tl.load(f, mask=known, other=0.0)
    f1 = tl.load(f + num_channels, mask=known, other=0.0)
    f2 = tl.load(f + 2 * num_channels, mask=known, other=0.0)
    result = f0[None, :] * gradient + f1[None, :] * value + f2[None, :]
    tl.store(dy + at, result.to(dy.dtype.element_ty), mask=inside)
    if NORMS == 2:
        f0 = tl.load(f + 3 * num_channels, mask=known, other=0.0)
        f1 = tl.load(f + 4 * num_channels, mask=known, other=0.0)
        f2 = tl.load(f + 5 * num_channels, mask=known, other=0.0)
        value = tl.load(y2 + at, mask=inside, other=0.0).to(tl.float32)
        result = f0[None, :] * gradient + f1[None, :] * value + f2[None, :]
        tl.store(dy2 + at, result.to(dy2.dtype.element_ty), mask=inside)
