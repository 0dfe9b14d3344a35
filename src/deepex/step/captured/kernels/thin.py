"""Convolutions with few channels on one side, as at both ends of an autoencoder: 1…4 there, many on the other side.

    z = thin_input_convolution(images, weight, bias, relu=True)            # (n, 1, h, w) → (n, 128, h, w)
    z = thin_input_convolution(images, weight, bias, True, padding=0)      # 5×5: (n, 1, h, w) → (n, 20, h − 4, w − 4)
    logits = thin_output_convolution(x, weight, bias, transposed=True)     # (n, 128, h, w) → (n, 1, h, w)

With stride 1, an odd window and padding to the same size; into a wide map also with less. Such a layer is as fast as the memory
that holds its wide map, of which every pass here reads or writes each element once. The wide map is in channels-last order: a
matrix of `rows` (pixels of all images) × `channels`. The thin map is so small that it stays in the cache; each program gathers
the `taps` of its rows from it, thin channels × window, into a matrix of rows × taps. Every pass is then one product of matrices, or
two:

    into a wide map     z  = taps(images) · W                             its gradient   dW = taps(images)ᵀ · dz
    out of a wide map   P  = x · W, and each output sums its taps in P    its gradients  dx = taps(dout) · Wᵀ, dW = taps(dout)ᵀ · x

Sums over rows are written by program and added up by a second small kernel in a fixed order: the same bits in every run.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import triton

from deepex.step.captured.kernels.division import as_rows, divide_rows, processors
from deepex.step.captured.kernels.thin_kernel import (
    finish_kernel,
    thin_input_gradient_kernel,
    thin_input_kernel,
    thin_output_gradient_kernel,
    thin_output_kernel,
)

MAX_THIN: Final = 4
WINDOWS: Final = (3, 5, 7)
MAX_TAPS: Final = 63  # thin channels × window; the matrix of more of them would not fit into the shared memory of many GPUs


def is_thin(channels: int, side: int) -> bool:
    """Whether the kernels take so many channels with such a window: 1…4 with 3×3, 1 or 2 with 5×5, 1 with 7×7."""
    return channels <= MAX_THIN and side in WINDOWS and channels * side * side <= MAX_TAPS


def thin_input_forward(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    relu: bool,
    padding: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution, plus bias, through a ReLU; in the dtype of the images, which the weight is rounded to.

    `padding`: half a window if not given, which keeps the size. With the ReLU comes what it let through: a bit for each element,
    a sixteenth of what the backward pass would read else.
    """
    channels, thin, side, _ = weight.shape
    _check(images, thin)
    images = as_rows(images)
    n, _, height, width = images.shape
    margin = _margin(images, side, padding)
    lines, columns = height - 2 * margin, width - 2 * margin
    rows = n * lines * columns
    out = torch.empty((n, channels, lines, columns), dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    taps = _padded(thin * side * side)
    # Of a product of 64 × 128 or 128 × 64, each of 128 threads has 64 sums, a word's bits among them. Six or eight programs to a
    # multiprocessor, in two rounds: the weight is loaded seldom, and stores overlap with the gathering of others.
    block = _channels(channels)
    tile = _rows(block, images.dtype)
    num_blocks = triton.cdiv(channels, block)
    words = torch.uint8 if block <= 64 else torch.uint16
    passed = torch.empty((rows, num_blocks, 8), dtype=words, device=images.device) if relu else None
    each, parts = divide_rows(rows, tile, max((8 if block == 64 else 6) * processors(images.device) // num_blocks, 1))
    thin_input_kernel[(parts, num_blocks)](
        images,
        weight.contiguous(),
        images if bias is None else bias,
        out,
        out if passed is None else passed,
        rows,
        each,
        HEIGHT=height,
        WIDTH=width,
        THIN=thin,
        SIDE=side,
        MARGIN=margin,
        NUM_CHANNELS=channels,
        BIAS=bias is not None,
        RELU=relu,
        ROWS=tile,
        CHANNELS=block,
        TAPS=taps,
        num_warps=4,
    )
    return out, passed


def thin_input_gradients(
    g: torch.Tensor, passed: torch.Tensor | None, images: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight and bias in float32 from that of the output, g; taken where a ReLU let it through, if there was one."""
    g, images = as_rows(g), as_rows(images)
    n, channels, lines, columns = g.shape
    _, thin, height, width = images.shape
    rows = n * lines * columns
    weight_grad = torch.empty((channels, thin, side, side), dtype=torch.float32, device=g.device)
    bias_grad = torch.empty(channels, dtype=torch.float32, device=g.device)
    taps = _padded(thin * side * side)
    # 64 rows of 128 channels of g are 16 KB, read two tiles ahead: three programs to a multiprocessor have 96 KB in flight, and the
    # fewer they are, the less there is to add up.
    block = _channels(channels)
    tile = _rows(block, g.dtype)
    num_blocks = triton.cdiv(channels, block)
    each, parts = divide_rows(rows, tile, max(3 * processors(g.device) // num_blocks, 1))
    partial = torch.empty(parts * channels * taps, dtype=torch.float32, device=g.device)
    thin_input_gradient_kernel[(parts, num_blocks)](
        g,
        g if passed is None else passed,
        images,
        partial,
        rows,
        each,
        HEIGHT=height,
        WIDTH=width,
        THIN=thin,
        SIDE=side,
        MARGIN=(height - lines) // 2,
        NUM_CHANNELS=channels,
        MASKS=passed is not None,
        ROWS=tile,
        CHANNELS=block,
        TAPS=taps,
        num_warps=4,
        num_stages=3,
    )
    area = side * side
    _finish(partial, parts, channels * taps, weight_grad, None, bias_grad, (thin, side, channels, taps), (area, thin * area))
    return weight_grad, bias_grad


def thin_output_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The convolution, or its transpose, plus bias; summed in float32 and given in `dtype`."""
    channels, thin = weight.shape[:2] if transposed else (weight.shape[1], weight.shape[0])
    side = weight.shape[2]
    _check(x, channels)
    if channels % 16:
        raise ValueError(f"{channels} wide channels: out of a wide map, they have to be a multiple of 16")
    x = as_rows(x)
    n, _, height, width = x.shape
    out = torch.empty((n, thin, height, width), dtype=dtype, device=x.device, memory_format=torch.channels_last)
    taps = _padded(thin * side * side)
    lines = _lines(n, height, width, thin * side * side, processors(x.device))
    bands = n * triton.cdiv(height, lines)
    # 64 rows of 128 channels of bf16 are 16 KB; four programs to a multiprocessor with one tile under way each are 64 KB, of which
    # the memory's latency needs 24. While one program sums over windows, others read.
    programs = min(bands, 4 * processors(x.device))
    span = (lines + side // 2 * 2) * width
    thin_output_kernel[(programs,)](
        x,
        weight.contiguous(),
        x if bias is None else bias,
        out,
        torch.empty(programs * thin * side * side * span, dtype=torch.float32, device=x.device),
        bands,
        HEIGHT=height,
        WIDTH=width,
        THIN=thin,
        SIDE=side,
        NUM_CHANNELS=channels,
        LINES=lines,
        TRANSPOSED=transposed,
        BIAS=bias is not None,
        ROWS=64 if x.dtype == torch.bfloat16 else 32,
        CHANNELS=_channels(channels),
        TAPS=taps,
        num_warps=4,
        num_stages=2,
    )
    return out


def thin_output_gradients(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, transposed: bool, masks: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of x (in its dtype), weight and bias (in float32), from that of the output.

    With `masks`, x is known to be the output of a ReLU, and nobody else's: its gradient is that before the ReLU, and lies where x
    did; and the last value has its sums per channel, the gradient of a bias in front of the ReLU.
    """
    channels, thin = weight.shape[:2] if transposed else (weight.shape[1], weight.shape[0])
    side = weight.shape[2]
    dout, x = as_rows(dout), as_rows(x)
    n, _, height, width = x.shape
    rows = n * height * width
    dx = x.detach() if masks else torch.empty_like(x)
    weight_grad = torch.empty(weight.shape, dtype=torch.float32, device=x.device)
    bias_grad = torch.empty(thin, dtype=torch.float32, device=x.device)
    sums = torch.empty(channels, dtype=torch.float32, device=x.device) if masks else None
    taps = _padded(thin * side * side)
    # 32 × 128 in 8 warps are 16 registers for each of dx and its sums, of 110 in all: two programs to a multiprocessor, with two
    # tiles of 8 KB of x under way each; as much is being written.
    tile = 32 if x.dtype == torch.bfloat16 else 16
    block = _channels(channels)
    num_blocks = triton.cdiv(channels, block)
    each, parts = divide_rows(rows, tile, max(2 * processors(x.device) // num_blocks, 1))
    size = channels * taps + taps + (channels if masks else 0)
    partial = torch.empty(parts * size, dtype=torch.float32, device=x.device)
    thin_output_gradient_kernel[(parts, num_blocks)](
        dout,
        x,
        weight.contiguous(),
        dx,
        partial,
        rows,
        each,
        HEIGHT=height,
        WIDTH=width,
        THIN=thin,
        SIDE=side,
        NUM_CHANNELS=channels,
        TRANSPOSED=transposed,
        MASKS=masks,
        ROWS=tile,
        CHANNELS=block,
        TAPS=taps,
        num_warps=8,
        num_stages=3,
    )
    area = side * side
    strides = (area, thin * area) if transposed else (channels * area, area)
    _finish(partial, parts, size, weight_grad, bias_grad, sums, (thin, side, channels, taps), strides)
    return dx, weight_grad, bias_grad, sums


def _finish(
    partial: torch.Tensor,
    parts: int,
    size: int,
    weight_grad: torch.Tensor,
    thin_sums: torch.Tensor | None,
    wide_sums: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int],
) -> None:
    thin, side, channels, taps = shape
    # 128 parts × 32 numbers (a line of the cache) are 32 loads in flight for each thread: 264 parts take three rounds
    block = min(max(triton.next_power_of_2(triton.cdiv(size, 8 * processors(partial.device))), 32), 1024)
    finish_kernel[(triton.cdiv(size, block),)](
        partial,
        weight_grad,
        partial if thin_sums is None else thin_sums,
        partial if wide_sums is None else wide_sums,
        parts,
        size,
        THIN=thin,
        SIDE=side,
        NUM_CHANNELS=channels,
        THIN_STRIDE=strides[0],
        CHANNEL_STRIDE=strides[1],
        INPUT=thin_sums is None,
        SUMS=wide_sums is not None,
        TAPS=taps,
        PARTS=4096 // block,
        BLOCK=block,
        num_warps=4,
    )


def _padded(taps: int) -> int:
    """A power of two, as Triton wants it, and 16 or more, as the tensor cores do; with one tap to spare at least."""
    return max(16, int(triton.next_power_of_2(taps + 1)))


def _channels(channels: int) -> int:
    """Channels of a program: a power of two, and 16 or more, as the tensor cores want; those that are not there are masked."""
    return max(16, min(int(triton.next_power_of_2(channels)), 128))


def _rows(block: int, dtype: torch.dtype) -> int:
    """Rows of a tile into a wide map, for a block of channels: measured on an H200."""
    return (128 if block == 64 else 64) // (1 if dtype == torch.bfloat16 else 2)


def _margin(images: torch.Tensor, side: int, padding: int | None) -> int:
    """How many pixels at each edge are no window's centre."""
    margin = 0 if padding is None else side // 2 - padding
    if not 0 <= margin <= side // 2 or min(images.shape[2:]) <= 2 * margin:
        raise ValueError(
            f"padding {padding} of images of {tuple(images.shape[2:])} for a window of {side}: it has to lie in 0…{side // 2}, "
            "and the window has to fit into the padded images"
        )
    return margin


def _lines(n: int, height: int, width: int, taps: int, num_processors: int) -> int:
    """Lines of a band: 64 KB of scratch at most (a whole small image), fewer where there are too few images for all processors."""
    lines = min(max(16_384 // (taps * width), 1), height)
    while n * -(-height // lines) < 4 * num_processors and lines > 7:
        lines = -(-lines // 2)
    return lines


def _check(maps: torch.Tensor, expected: int) -> None:
    if maps.shape[1] != expected:
        raise ValueError(f"the map has {maps.shape[1]} channels, the weight is for {expected}")
    if maps.numel() // maps.shape[1] * MAX_THIN >= 2**31:
        raise ValueError(f"{maps.numel() // maps.shape[1]} pixels in a batch: the kernels count up to 2³¹ of {MAX_THIN} channels")


def _check_taps(channels: int, side: int) -> None:
    if not is_thin(channels, side):
        raise ValueError(
            f"window {side} over {channels} channels: this is for windows of {WINDOWS} over up to {MAX_THIN} channels, {MAX_TAPS} "
            "elements in all"
        )


class _ThinInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, relu: bool, padding: int | None
    ) -> torch.Tensor:
        assert not ctx.needs_input_grad[0], "the images are the network's input: their gradient is not computed"
        out, passed = thin_input_forward(images, weight, bias, relu=relu, padding=padding)
        ctx.save_for_backward(images, passed)
        ctx.side = weight.shape[2]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, passed = ctx.saved_tensors
        weight_grad, bias_grad = thin_input_gradients(grads[0], passed, images, ctx.side)
        return None, weight_grad, bias_grad if ctx.needs_input_grad[2] else None, None, None


class _ThinOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        dtype: torch.dtype,
        masks: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.masks = transposed, masks
        return thin_output_forward(x, weight, bias, transposed=transposed, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        masks = ctx.masks is not None
        dx, weight_grad, bias_grad, sums = thin_output_gradients(grads[0], x, weight, transposed=ctx.transposed, masks=masks)
        if sums is not None:
            ctx.masks(sums)
        return dx, weight_grad, bias_grad if ctx.needs_input_grad[2] else None, None, None, None


def thin_input_convolution(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    relu: bool,
    *,
    padding: int | None = None,
) -> torch.Tensor:
    """relu(conv(images) + bias) with weight (channels, 1…4, side, side). There is no gradient for the images.

    `padding`: 0…side // 2, the last if not given.
    """
    _check_taps(weight.shape[1], weight.shape[2])
    return cast("torch.Tensor", _ThinInput.apply(images, weight, bias, relu, padding))


def thin_output_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
    *,
    dtype: torch.dtype = torch.float32,
    masks: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Convolution to 1…4 channels, weight (thin, channels, side, side), or its transpose, weight (channels, thin, side, side).

    With `masks`, x is a ReLU's output that nobody else needs, and its gradient is that of the ReLU's input: the ReLU must not be
    differentiated again. `masks` is called with the sums of this gradient per channel.
    """
    thin = weight.shape[1 if transposed else 0]
    _check_taps(thin, weight.shape[2])
    return cast("torch.Tensor", _ThinOutput.apply(x, weight, bias, transposed, dtype, masks))
