"""What modules of a user's network the kernels can do, and how."""

from typing import Any

from torch import nn

from deepex.step.captured.kernels.thin import is_thin


def can_pool(pool: Any) -> bool:
    """Whether the kernels do this max pooling."""
    pairs = [_pair(value) for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
    square = all(one == other for one, other in pairs)
    return square and pairs[3] == (1, 1) and not pool.return_indices and pairs[0][0] <= 3


def is_mean(module: Any) -> bool:
    """Whether this is average pooling over whole maps."""
    return type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1))


def can_fold(module: Any) -> bool:
    """Whether a convolution of the images is faster over folded ones: few channels, and a stride."""
    plain = type(module) is nn.Conv2d and module.groups == 1 and module.dilation == (1, 1)
    square = len(set(module.kernel_size)) == len(set(module.stride)) == len(set(module.padding)) == 1
    return plain and square and module.stride[0] > 1 and module.kernel_size[0] > module.stride[0] and module.in_channels <= 4


def can_be_thin_input(module: Any) -> bool:
    """Whether the thin kernels do this convolution of the images."""
    side, padding = module.kernel_size[0], module.padding[0]
    square = module.kernel_size == (side, side) and module.padding == (padding, padding)
    centred = square and padding <= side // 2
    few = is_thin(module.in_channels, side) and module.groups == 1
    return type(module) is nn.Conv2d and centred and few and module.stride == (1, 1) and module.dilation == (1, 1)


def can_be_thin_output(module: Any) -> bool:
    """Whether the thin kernels do this convolution to few channels."""
    side = module.kernel_size[0]
    centred = module.kernel_size == (side, side) and module.padding == (side // 2, side // 2)
    few = is_thin(module.out_channels, side) and module.in_channels % 16 == 0 and module.groups == 1
    return centred and few and module.stride == (1, 1) and module.dilation == (1, 1) and _no_output_padding(module)


def is_response(module: Any) -> bool:
    """Whether this is local response normalisation across channels: torch's, or one that says so."""
    return type(module) is nn.LocalResponseNorm or getattr(module, "is_local_response", False)


def is_convolution(module: Any) -> bool:
    """Whether a transposed convolution is a plain one with its weight turned round."""
    fits = all(pad < side for side, pad in zip(module.kernel_size, module.padding, strict=True))
    return fits and module.stride == (1, 1) and module.dilation == (1, 1) and module.groups == 1 and _no_output_padding(module)


def _no_output_padding(module: Any) -> bool:
    return not any(_pair(getattr(module, "output_padding", 0)))


def window(pool: Any) -> tuple[int, int, int, bool]:
    """Side, stride and padding of a pooling, and whether it rounds up."""
    kernel, stride, padding = (_pair(value)[0] for value in (pool.kernel_size, pool.stride, pool.padding))
    return kernel, stride, padding, pool.ceil_mode


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
