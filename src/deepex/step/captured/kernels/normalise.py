"""Batch norm with its shortcut and ReLU as one operation with a gradient.

    z = normalise(y, norm, relu=True)                              # relu(norm(y))
    z, again = normalise_add(y, norm, shortcut, None, relu=True)   # relu(norm(y) + shortcut)
    z, again = normalise_add(y, norm, y2, norm2, relu=True)        # relu(norm(y) + norm2(y2))

`again` is `z` once more, for the second of two users: the gradients of both come to the backward pass apart and are added there, on
the way, instead of in a pass of their own. `owned` says that nobody else has y, y2, or the gradient of z: what the backward pass
makes of them then lies where they did.

    make = remaker(z)      # z need not be kept for the backward pass: make() is z once more, until its own gradient is computed
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
from torch import nn
from torch.autograd.function import once_differentiable

from deepex.step.captured.kernels import norm as kernels
from deepex.step.captured.kernels.division import FINISHED, at_once, processors

Owned = tuple[bool, bool, bool]
_FEW_ROWS, _SMALL_ROWS = 512, 2048  # up to here one program holds all rows of some channels
_LARGE = 1 << 23  # elements of a map that is read from memory, not from the cache
_Tile = tuple[int, int, int, int]  # rows, channels, programs for each processor, warps
# Of passes that reduce, measured on an H200: 64 channels are whole cache lines.
_STATISTICS: Final[_Tile] = 64, 64, 4, 8
_SMALL_STATISTICS: Final[_Tile] = 128, 32, 2, 8
_SUMS: Final[_Tile] = 64, 64, 4, 4
_SUMS_WRITTEN: Final[_Tile] = 32, 64, 4, 4  # by a program that writes what it adds up


def normalise(y: torch.Tensor, norm: nn.BatchNorm2d, *, relu: bool, owned: bool = False) -> torch.Tensor:
    """norm(y), or relu(norm(y)); moves the running averages as the module would."""
    z: torch.Tensor = _Normalise.apply(y, norm.weight, norm.bias, None, None, None, norm, None, relu, (owned, False, False))[0]
    return z


def remaker(z: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """What makes `z`, given by `normalise`, again, bit by bit; None if it has no gradient, for which it would keep y."""
    node: Any = z.grad_fn

    def make() -> torch.Tensor:
        y, _, _, _, _, saved, _ = node.saved_tensors
        z = torch.empty_like(y)
        _apply(y, saved, y, saved, z, second=0, relu=node.relu)
        return z

    return None if node is None else make


def normalise_add(
    y: torch.Tensor,
    norm: nn.BatchNorm2d,
    other: torch.Tensor,
    other_norm: nn.BatchNorm2d | None,
    *,
    relu: bool,
    owned: Owned = (False, False, False),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of norm(y) and `other`, which may have a norm of its own; twice, for two users."""
    gamma, beta = (None, None) if other_norm is None else (other_norm.weight, other_norm.bias)
    z, again = _Normalise.apply(y, norm.weight, norm.bias, other, gamma, beta, norm, other_norm, relu, owned)
    return z, again


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
        other: torch.Tensor | None,
        gamma2: torch.Tensor | None,
        beta2: torch.Tensor | None,  # noqa: ARG004 - the kernel takes it from norm2; it is here to get its gradient
        norm: nn.BatchNorm2d,
        norm2: nn.BatchNorm2d | None,
        relu: bool,
        owned: Owned,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = _last(y)
        other = None if other is None else _last(other.to(y.dtype))
        channels = y.shape[1]
        rows = y.numel() // channels
        saved = torch.empty((4, channels), device=y.device)
        saved2 = torch.empty((4, channels), device=y.device) if norm2 is not None else saved
        z = torch.empty_like(y)
        second = 0 if other is None else 1 if norm2 is None else 2
        x2, n2 = (y if other is None else other), (norm2 or norm)
        if _is_small(rows, channels):
            height, width, warps = _small_tile(rows)
            kernels.small_kernel[(triton.cdiv(channels, width),)](
                *(y, gamma, beta, saved, norm.running_mean, norm.running_var),
                *(x2, n2.weight, n2.bias, saved2, n2.running_mean, n2.running_var),
                *(z, rows, channels, norm.eps, norm.momentum, n2.eps, n2.momentum),
                *(_tracks(norm), _tracks(n2), second, relu, height, width),
                num_warps=warps,
            )
        else:
            statistics(y, gamma, beta, norm, saved)
            if norm2 is not None:
                statistics(x2, n2.weight, n2.bias, n2, saved2)
            _apply(y, saved, x2, saved2, z, second=second, relu=relu)
        ctx.save_for_backward(y, other if second == 2 else None, z if second and relu else None, gamma, gamma2, saved, saved2)
        ctx.second, ctx.relu, ctx.owned = second, relu, owned
        ctx.set_materialize_grads(False)
        return z, _again(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor | None, again: torch.Tensor | None) -> tuple[Any, ...]:
        y, y2, z, gamma, gamma2, saved, saved2 = ctx.saved_tensors
        ours = ctx.owned[2] and g is not None
        if g is None:
            g, again = again, None
        if g is None:
            return (None,) * 10
        came, g, again = g, _last(g.to(y.dtype)), None if again is None else _last(again.to(y.dtype))
        channels = y.shape[1]
        rows = y.numel() // channels
        num_norms = 2 if ctx.second == 2 else 1
        mask = 0 if not ctx.relu else 1 if ctx.second == 0 else 2
        writes = ctx.second > 0 and (mask > 0 or again is not None)
        grads = torch.empty((2 * num_norms, channels), device=y.device)
        factors = torch.empty((3 * num_norms, channels), device=y.device)
        d = g if not writes or ours or g is not came else torch.empty_like(y)
        dy = _place(y, owned=ctx.owned[0])
        dy2 = dy if y2 is None else _place(y2, owned=ctx.owned[1])
        inputs = (g, g if again is None else again, y, y if y2 is None else y2, y if z is None else z, d)
        norms = (gamma, saved, gamma if gamma2 is None else gamma2, saved2)
        if _is_small(rows, channels):
            height, width, warps = _small_tile(rows)
            kernels.small_gradient_kernel[(triton.cdiv(channels, width),)](
                *(*inputs, *norms, grads, factors, dy, dy2, rows, channels),
                *(again is not None, mask, num_norms, writes, height, width),
                num_warps=warps,
            )
        else:
            height, width, parts, each, warps = _split(y, _SUMS_WRITTEN if writes else _SUMS)
            partial = torch.empty((parts, num_norms + 1, channels), device=y.device)
            kernels.gradient_sums_kernel[(parts, triton.cdiv(channels, width))](
                *(*inputs, partial, saved, saved2, rows, channels, each, again is not None, mask, num_norms, writes, height, width),
                num_warps=warps,
            )
            finish_gradients(partial, norms, grads, factors, rows)
            height, width = _tile(channels)
            grid = (triton.cdiv(rows, height), triton.cdiv(channels, width))
            kernels.gradient_kernel[grid](
                *(d, y, inputs[3], saved, factors, dy, dy2, rows, channels, 0 if writes else mask, num_norms, height, width),
                num_warps=4,
            )
        shortcut = None if ctx.second == 0 else d if ctx.second == 1 else dy2
        gamma2_grad, beta2_grad = (grads[2], grads[3]) if num_norms == 2 else (None, None)
        return dy, grads[0], grads[1], shortcut, gamma2_grad, beta2_grad, *[None] * 4


def _apply(
    y: torch.Tensor, saved: torch.Tensor, y2: torch.Tensor, saved2: torch.Tensor, z: torch.Tensor, *, second: int, relu: bool
) -> None:
    channels = y.shape[1]
    rows = y.numel() // channels
    height, width = _tile(channels)
    grid = (triton.cdiv(rows, height), triton.cdiv(channels, width))
    kernels.apply_kernel[grid](y, saved, y2, saved2, z, rows, channels, second, relu, height, width, num_warps=4)


def statistics(y: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, norm: nn.BatchNorm2d, saved: torch.Tensor) -> None:
    """Fill `saved` from the channels-last map `y`, and move the running averages."""
    channels = y.shape[1]
    rows = y.numel() // channels
    height, width, parts, each, warps = _split(y, _STATISTICS if y.numel() > _LARGE else _SMALL_STATISTICS)
    partial = torch.empty((parts, 2, channels), device=y.device)
    grid = (parts, triton.cdiv(channels, width))
    kernels.statistics_kernel[grid](y, partial, rows, channels, each, height, width, num_warps=warps)
    kernels.finish_statistics_kernel[(triton.cdiv(channels, FINISHED),)](
        *(partial, gamma, beta, saved, norm.running_mean, norm.running_var, rows, channels, each, parts, norm.eps, norm.momentum),
        *(_tracks(norm), FINISHED, at_once(parts)),
        num_warps=4,
    )


def finish_gradients(
    partial: torch.Tensor, norms: tuple[torch.Tensor, ...], grads: torch.Tensor, factors: torch.Tensor, rows: int
) -> None:
    """From what programs found (parts, norms + 1, channels): the gradients of scales and shifts, and the factors of the maps'."""
    parts, sums, channels = partial.shape
    kernels.finish_gradient_kernel[(triton.cdiv(channels, FINISHED),)](
        *(partial, *norms, grads, factors, rows, channels, parts, sums - 1, FINISHED, at_once(parts)), num_warps=4
    )


def _split(y: torch.Tensor, tile: _Tile) -> tuple[int, int, int, int, int]:
    """How a pass that reduces is split: rows and channels of a tile, parts, rows of each part, warps."""
    channels = y.shape[1]
    height, width, programs, warps = tile
    rows, width = y.numel() // channels, min(width, triton.next_power_of_2(channels))
    parts = max(1, processors(y.device) * programs // triton.cdiv(channels, width))
    each = triton.cdiv(triton.cdiv(rows, parts), height) * height
    return height, width, triton.cdiv(rows, each), each, warps


def _tile(channels: int) -> tuple[int, int]:
    """Rows and channels of a tile of a pass that does not reduce."""
    width = min(128, triton.next_power_of_2(channels))
    return 2048 // width, width


def _is_small(rows: int, channels: int) -> bool:
    """Whether one launch is faster than two or three."""
    return rows <= _FEW_ROWS or (rows <= _SMALL_ROWS and channels <= 1024)


def _small_tile(rows: int) -> tuple[int, int, int]:
    """All rows, how many channels, and warps."""
    return max(triton.next_power_of_2(rows), 16), *((16, 4) if rows <= _FEW_ROWS else (8, 8))


def _place(y: torch.Tensor, *, owned: bool) -> torch.Tensor:
    """Where the gradient of y goes."""
    return y.detach() if owned else torch.empty_like(y)


def _again(z: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor; not a view: autograd must keep them apart."""
    other = torch.empty(0, dtype=z.dtype, device=z.device)
    return other.set_(z.untyped_storage(), z.storage_offset(), z.shape, z.stride())


def _tracks(norm: nn.BatchNorm2d) -> bool:
    return norm.running_mean is not None


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)
