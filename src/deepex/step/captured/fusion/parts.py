"""The modules that stand in a network's graph for chains of its own.

They hold the user's modules in tuples, so that these stay where they are: in the user's network.

`owned` of some: whether a map that comes in, or the gradient of the one that goes out, is nobody else's. The backward
pass then writes where it reads, and a step needs less memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from deepex.step.captured.fusion.kinds import is_convolution, window
from deepex.step.captured.kernels.dropout import Dropout
from deepex.step.captured.kernels.fork import fork
from deepex.step.captured.kernels.join import can_join, join
from deepex.step.captured.kernels.mean import mean
from deepex.step.captured.kernels.noise import noise_like
from deepex.step.captured.kernels.normalise import normalise, normalise_add, remaker
from deepex.step.captured.kernels.pool import NormReluPool, ReluPool
from deepex.step.captured.kernels.response import LocalResponse
from deepex.step.captured.kernels.take import folded_channels
from deepex.step.captured.kernels.thin import thin_input_convolution, thin_output_convolution
from deepex.step.captured.kernels.transpose import Transposition
from deepex.step.captured.linear_ops import ConvolutionShape, Lane, Reorder, convolve, dense, flipped, folded

_HUGE_BYTES: Final = 1 << 28  # a map so large that a pass over it, 0.2 ms on an H200, is worth its memory


@dataclass(frozen=True, kw_only=True)
class FusionContext:
    """What fused parts compute with.

    `weights` gives the tensor to compute with for each parameter: its bf16 twin, or itself; `room` memory for it in another order,
    or None. `key`: one number on the device, of this step's random choices. `folds`: whether the network may get its images folded.
    """

    weights: Callable[[nn.Parameter], torch.Tensor]
    lane: Lane
    key: torch.Tensor
    folds: bool = False
    room: Callable[[nn.Parameter], torch.Tensor | None] = lambda _parameter: None


class Normed(nn.Module):
    """norm(y), or relu(norm(y))."""

    def __init__(self, norm: nn.BatchNorm2d, *, relu: bool) -> None:
        super().__init__()
        self._norm, self._relu = (norm,), relu
        self.owned = False  # y

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return normalise(y, self._norm[0], relu=self._relu, owned=self.owned)


class Joined(nn.Module):
    """norm(y) + other, where `other` may have a norm of its own; activated or not; twice, for two users."""

    def __init__(self, norm: nn.BatchNorm2d | None, other: nn.BatchNorm2d | None, *, relu: bool) -> None:
        super().__init__()
        assert norm is not None
        self._norms, self._relu = (norm, other), relu
        self.owned = (False, False, False)  # both inputs, the first output's gradient

    def forward(self, y: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, other_norm = self._norms
        if y.shape == other.shape:
            return normalise_add(y, norm, other, other_norm, relu=self._relu, owned=self.owned)
        total = normalise(y, norm, relu=False) + (other if other_norm is None else normalise(other, other_norm, relu=False))
        total = total.relu() if self._relu else total
        return total, total


class Forked(nn.Module):
    """A map once for each of its users, whose gradients are then added in one pass."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The map, as often as it is used."""
        return fork(x, self._count) if x.dim() == 4 and x.requires_grad else (x,) * self._count


class Concatenated(nn.Module):
    """Maps one behind the other along their channels."""

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """All of them in one."""
        return join(maps) if can_join(maps) else torch.cat(list(maps), dim=1)


class NormedPool(nn.Module):
    """pool(relu(norm(y)))."""

    def __init__(self, norm: nn.BatchNorm2d, pool: nn.Module) -> None:
        super().__init__()
        self._norm, self._window = (norm,), window(pool)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        norm = self._norm[0]
        z: torch.Tensor = NormReluPool.apply(y, norm.weight, norm.bias, norm, *self._window)
        return z


class Pool(nn.Module):
    """Max pooling alone."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self._window = window(pool)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = ReluPool.apply(y, None, False, *self._window)
        return z


class MapMean(nn.Module):
    """The mean of each map."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean(x) if x.dim() == 4 else functional.adaptive_avg_pool2d(x, 1)


class Convolution(nn.Module):
    """A convolution or a transposed one, with its bias and ReLU. `folds`: over images of which squares are folded into channels."""

    def __init__(self, module: Any, context: FusionContext, *, relu: bool, folds: bool = False) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._relu, self._lane = relu, context.lane
        self.owned = False  # the output's gradient
        self.remakes = False  # whether its input, if huge, is made again in the backward pass: it is a norm's, and nobody else's
        self.masked = False  # whether the next one's backward pass is also that of bias and ReLU here
        self._reorder: Reorder | None = None
        self._other: tuple[Any, ...] = ()
        transposed = isinstance(module, nn.ConvTranspose2d)
        self._geometry = ConvolutionShape(
            stride=module.stride, padding=module.padding, dilation=module.dilation, groups=module.groups
        )
        if folds:
            self._reorder = folded(self._weight, module.stride[0], folded_channels(module.stride[0], module.in_channels))
            self._geometry = ConvolutionShape(stride=(1, 1), padding=(0, 0))
        elif transposed and is_convolution(module):
            self._reorder = flipped(self._weight)
            padding = tuple(side - 1 - pad for side, pad in zip(module.kernel_size, module.padding, strict=True))
            self._geometry = ConvolutionShape(stride=(1, 1), padding=padding)
        elif transposed:
            self._other = (module,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        remake = remaker(x) if self.remakes and x.nbytes >= _HUGE_BYTES and x.dtype == self._weight.dtype else None
        x = _last(x.to(self._weight.dtype))
        if not self._other:
            return convolve(
                *(x, self._weight, self._bias, self._geometry),
                relu=self._relu,
                lane=self._lane,
                reorder=self._reorder,
                owned=self.owned,
                remake=remake,
                masked=self.masked,
            )
        module = self._other[0]
        y = functional.conv_transpose2d(
            x, self._weight, self._bias, module.stride, module.padding, module.output_padding, module.groups, module.dilation
        )
        return y.relu() if self._relu else y

    def can_be_masked(self) -> bool:
        """Whether there is a ReLU, and its gradient can be left to the next one."""
        return self._relu and not self._other

    def give_bias(self, gradient: torch.Tensor) -> None:
        """Take the bias's gradient from there."""
        if self._bias is not None and self._bias.requires_grad:
            self._lane.give(self._bias, gradient)


class PooledConvolution(nn.Module):
    """pool(relu(convolution + bias)): bias and ReLU are left to the pooling, which reads the map anyway.

    `thin`: of the images, which have few channels.
    """

    def __init__(self, module: Any, pool: nn.Module, context: FusionContext, *, relu: bool, thin: bool = False) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._relu, self._lane, self._window = relu, context.lane, window(pool)
        self._thin = thin
        self._geometry = ConvolutionShape(
            stride=module.stride, padding=module.padding, dilation=module.dilation, groups=module.groups
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _last(x.to(self._weight.dtype))
        if self._thin:
            y = thin_input_convolution(x, self._weight, None, False, padding=self._geometry.padding[0])
        else:
            y = convolve(x, self._weight, None, self._geometry, relu=False, lane=self._lane)
        z: torch.Tensor = ReluPool.apply(y, self._bias, self._relu, *self._window, self._lane.give)
        return z


class ThinInput(nn.Module):
    """A convolution of the images, which have few channels."""

    def __init__(self, module: Any, context: FusionContext, *, relu: bool) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._relu, self._padding = relu, int(module.padding[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _last(x.to(self._weight.dtype))
        return thin_input_convolution(x, self._weight, self._bias, self._relu, padding=self._padding)


class ThinOutput(nn.Module):
    """A convolution or transposed one to few channels."""

    def __init__(self, module: nn.Conv2d | nn.ConvTranspose2d, context: FusionContext) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._transposed = isinstance(module, nn.ConvTranspose2d)
        self.before: tuple[Convolution, ...] = ()  # whose ReLU this one's backward pass does, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _last(x.to(self._weight.dtype))
        masks = self.before[0].give_bias if self.before else None
        return thin_output_convolution(x, self._weight, self._bias, self._transposed, masks=masks)


class Dense(nn.Module):
    """A dense layer, with its bias and ReLU."""

    def __init__(self, module: nn.Linear, context: FusionContext, *, relu: bool) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._relu, self._lane = relu, context.lane

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _dense(x, self._weight, self._bias, relu=self._relu, lane=self._lane)


class FlatDense(nn.Module):
    """A dense layer on flattened maps, which stay in channels-last order where it is cheaper to turn the weights than the maps."""

    def __init__(self, module: nn.Linear, context: FusionContext, *, relu: bool, room: torch.Tensor | None = None) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._relu, self._lane, self._room = relu, context.lane, room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._weight.dtype)
        if x.dim() == 4 and x.shape[2] * x.shape[3] > 1 and len(x) >= len(self._weight) and self._weight.is_contiguous():
            turn = Transposition(outer=len(self._weight), rows=x.shape[1], columns=x.shape[2] * x.shape[3])
            flat = _last(x).permute(0, 2, 3, 1).reshape(len(x), -1)
            return dense(flat, self._weight, self._bias, relu=self._relu, lane=self._lane, reorder=turn, room=self._room)
        return _dense(x.flatten(1), self._weight, self._bias, relu=self._relu, lane=self._lane)


class DenseMaps(nn.Module):
    """A dense layer whose output becomes maps; in channels-last order where it is cheaper to turn the weights than the maps."""

    def __init__(
        self, module: nn.Linear, shape: tuple[int, ...], context: FusionContext, *, relu: bool, room: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._weight, self._bias = _tensors(module, context)
        self._shape = tuple(torch.empty(len(self._weight), device="meta").unflatten(0, shape).shape)  # one side may be −1
        self._relu, self._lane, self._room = relu, context.lane, room
        self.owned = False  # the output's gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._weight.dtype)
        if x.dim() == 2 and len(self._shape) == 3 and len(x) >= self._weight.shape[1] and self._weight.is_contiguous():
            channels, height, width = self._shape
            turn = Transposition(rows=channels, columns=height * width, inner=self._weight.shape[1])
            bias_turn = Transposition(rows=channels, columns=height * width)
            y = dense(
                *(x, self._weight, self._bias),
                relu=self._relu,
                lane=self._lane,
                reorder=turn,
                bias_reorder=bias_turn,
                room=self._room,
                owned=self.owned,
            )
            return y.view(len(x), height, width, channels).permute(0, 3, 1, 2)
        y = _dense(x, self._weight, self._bias, relu=self._relu, lane=self._lane)
        return y.view(*y.shape[:1], *self._shape, *y.shape[2:])


class Dropped(nn.Module):
    """Dropout, by this step's key."""

    def __init__(self, module: nn.Dropout, context: FusionContext, salt: int) -> None:
        super().__init__()
        self._p, self._key, self._salt = module.p, context.key, salt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Dropout.apply(x, self._p, self._key, self._salt)
        return y


class Noise(nn.Module):
    """torch.randn_like, by this step's key."""

    def __init__(self, context: FusionContext, salt: int) -> None:
        super().__init__()
        self._key, self._salt = context.key, salt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noise_like(x.detach(), self._key, self._salt)


class Response(nn.Module):
    """Local response normalisation across channels."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._constants = module.size, module.alpha, module.beta, module.k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = LocalResponse.apply(x, *self._constants)
        return y


_MAKERS = (
    *(Normed, NormedPool, Pool, MapMean, Convolution, PooledConvolution, ThinInput, ThinOutput),
    *(DenseMaps, Dropped, Response, Concatenated),
)
_PLAIN = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def leaves_output(module: Any) -> bool:
    """Whether a module needs its output no longer once it is made: a convolution without a ReLU."""
    return type(module) is Convolution and not module._relu


def makes_smaller(module: Any) -> bool:
    """Whether a module makes small maps of large ones: a convolution with a stride."""
    return type(module) is Convolution and max(module._geometry.stride) > 1 and not module._other


def makes_new_gradient(module: Any) -> bool:
    """Whether the gradient of a module's input lies in memory of its own."""
    return type(module) in (Convolution, PooledConvolution, ThinOutput, Pool, MapMean, Dense, FlatDense, DenseMaps)


def makes_maps(module: Any) -> bool:
    """Whether what a module returns is a map in memory of its own."""
    return type(module) in _MAKERS or type(module) in _PLAIN or (type(module) is nn.ReLU and not module.inplace)


def only_reads(module: Any) -> bool:
    """Whether a module neither changes its input nor returns a part of it."""
    return makes_maps(module) or type(module) in (Joined, Dense, FlatDense)


def _tensors(module: Any, context: FusionContext) -> tuple[torch.Tensor, torch.Tensor | None]:
    return context.weights(module.weight), None if module.bias is None else context.weights(module.bias)


def _dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, relu: bool, lane: Lane) -> torch.Tensor:
    y = dense(x.reshape(-1, x.shape[-1]).to(weight.dtype), weight, bias, relu=relu, lane=lane)
    return y.view(*x.shape[:-1], -1)


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
