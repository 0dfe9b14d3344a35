"""Convolutions and dense layers whose weight gradients are computed beside the rest of the backward pass.

    lane = Lane(device)
    y = convolve(x, weight, bias, geometry, relu=True, lane=lane)
    loss.backward(); lane.join(); lane.gradient(weight)

A weight's gradient is needed by the update alone, the input's gradient by everything that follows. So the first goes to a stream of
its own, where it fills what the other leaves of the GPU, and is given to the lane; unless it is so large that it fills the GPU by
itself. Bias and ReLU are part of the same kernel forwards, and of one pass backwards; `owned` says that the gradient that comes in
is nobody else's: this pass may then write where it reads.
"""

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepex.step.captured.kernels.activation import bias_gradient, bias_relu_backward
from deepex.step.captured.kernels.dense import dense_weight_gradient, is_small
from deepex.step.captured.kernels.folded import can_be_folded, folded_forward, folded_weight_gradient
from deepex.step.captured.kernels.transpose import Transposition, gather

_DEPTH: Final = 4  # gradients that may be behind: their inputs stay in memory so long
_LARGE_BYTES: Final = 1 << 26  # of inputs: measured on an H200, 50 MB are faster beside others, 200 MB by themselves


class Lane:
    """A second stream. What `run` is given runs there, after what the current stream was given before, and in the order of calls.

    Who owns the tensors that the work reads: this object, until the current stream has been made to wait for the work; only then
    may the allocator give their memory to others on that stream.

    `most_bytes` of inputs may be behind, beside the last. Work with large inputs has the GPU for itself: it runs at once, on the
    current stream.
    """

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self._stream = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._pending: deque[tuple[Any, tuple[torch.Tensor, ...]]] = deque()
        self._gradients: dict[int, torch.Tensor] = {}
        self.most_bytes = 0

    def give(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the gradient of a leaf; its precision may be another than the leaf's."""
        before = self._gradients.get(id(leaf))
        self._gradients[id(leaf)] = gradient if before is None else before + gradient

    def gradient(self, leaf: torch.Tensor, *twins: torch.Tensor) -> torch.Tensor | None:
        """What a leaf was given here and by autograd, each for some of its uses; with what autograd gave its twins."""
        found = [self._gradients.get(id(leaf)), *(one.grad for one in (leaf, *twins))]
        gradients = [gradient for gradient in found if gradient is not None]
        return functools.reduce(operator.add, gradients) if gradients else None

    def clear(self) -> None:
        """Before a step."""
        self._gradients.clear()

    def moment(self) -> Any:
        """Where the current stream is now: work may run from there on, though it is given later."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def run(self, work: Callable[[], None], *reads: torch.Tensor, since: Any = None) -> None:
        """Run `work`, which reads the tensors `reads`; they are there since that `moment`, or since now."""
        if self._stream is None or _bytes(reads) > _LARGE_BYTES:
            self.join()  # the leaf may have got a gradient there
            work()
            return
        main = torch.cuda.current_stream()
        self._stream.wait_event(since or self.moment())
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record(self._stream)
        self._pending.append((event, reads))
        while len(self._pending) > 1 and (len(self._pending) > _DEPTH or self._held() > self.most_bytes):
            main.wait_event(self._pending.popleft()[0])

    def _held(self) -> int:
        return sum(_bytes(reads) for _, reads in self._pending)

    def join(self) -> None:
        """Make the current stream wait for all of it; not for nothing: a capture may not wait for a stream that it never met."""
        if self._stream is not None and self._pending:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._pending.clear()


@dataclass(frozen=True, kw_only=True)
class ConvolutionShape:
    """Of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1


class Reorder:
    """A weight in another arrangement, with zeros where it has nothing: a gather forwards, and one backwards.

    `arrange` maps a tensor of the weight's shape to the new shape, with −1 for what is not there.
    """

    def __init__(self, weight: torch.Tensor, arrange: Any) -> None:
        places = torch.arange(weight.numel(), device=weight.device).as_strided(weight.shape, weight.stride())
        arranged = arrange(places).contiguous(memory_format=torch.channels_last)
        self._shape, self._stride = arranged.shape, arranged.stride()
        flat = _flat(arranged)
        there = flat >= 0
        back = torch.empty_like(places)
        _flat(back)[flat[there]] = torch.arange(flat.numel(), device=weight.device)[there]
        self._from, self._back = flat.to(torch.int32), _flat(back).to(torch.int32)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, arranged."""
        return gather(_flat(weight), self._from).as_strided(self._shape, self._stride)

    def back(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight, from that of the arranged one."""
        dense = gradient.contiguous(memory_format=torch.channels_last)
        return gather(_flat(dense), self._back).as_strided(weight.shape, weight.stride())


def folded(weight: torch.Tensor, stride: int, wide: int) -> Reorder:
    """For a convolution over maps of which squares of its stride are folded into `wide` channels: a smaller kernel, stride 1."""

    def arrange(places: torch.Tensor) -> torch.Tensor:
        outputs, inputs, *sides = places.shape
        height, width = (-(-side // stride) for side in sides)
        padded = functional.pad(places, (0, width * stride - sides[1], 0, height * stride - sides[0]), value=-1)
        squares = padded.reshape(outputs, inputs, height, stride, width, stride).permute(0, 3, 5, 1, 2, 4)
        channels = stride * stride * inputs
        return functional.pad(squares.reshape(outputs, channels, height, width), (0, 0, 0, 0, 0, wide - channels), value=-1)

    return Reorder(weight, arrange)


def flipped(weight: torch.Tensor) -> Reorder:
    """A transposed convolution's weight as that of the convolution which does the same."""
    return Reorder(weight, lambda places: places.flip(2, 3).transpose(0, 1))


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvolutionShape,
    *,
    relu: bool,
    lane: Lane,
    reorder: Reorder | None = None,
    owned: bool = False,
    remake: Callable[[], torch.Tensor] | None = None,
    masked: bool = False,
) -> torch.Tensor:
    """A convolution, with bias and ReLU where there are any; the lane is given the gradients of weight and bias.

    `remake`: makes x again in the backward pass, so that it is not kept until then. `masked`: the gradient that comes is that in
    front of the ReLU already, and the bias has got its own.
    """
    y: torch.Tensor = _Convolve.apply(x, weight, bias, geometry, relu, lane, reorder, owned, remake, masked)
    return y


def dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    relu: bool,
    lane: Lane,
    reorder: Transposition | None = None,
    bias_reorder: Transposition | None = None,
    room: torch.Tensor | None = None,
    owned: bool = False,
) -> torch.Tensor:
    """A dense layer, with bias and ReLU where there are any; the lane is given the gradients of weight and bias.

    `room`: memory for the weight in another order, until the backward pass is over.
    """
    arranged = weight.detach() if reorder is None else reorder(weight.detach(), room)
    y: torch.Tensor = _Dense.apply(x, weight, bias, arranged, relu, lane, reorder, bias_reorder, owned)
    return y


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        geometry, relu, _, reorder, _, remake, masked = how
        arranged = weight if reorder is None else reorder(weight)
        ctx.folded = geometry == ConvolutionShape(stride=(1, 1), padding=(0, 0)) and not relu and can_be_folded(x, arranged)
        if ctx.folded:
            y = folded_forward(x, arranged, bias)
        elif relu and bias is not None and x.is_cuda:
            y = torch.cudnn_convolution_relu(
                x, arranged, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
            )
        else:
            y = functional.conv2d(x, arranged, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
            y = y.relu_() if relu else y
        ctx.save_for_backward(x if remake is None else None, arranged, y if relu and not masked else None)
        ctx.weight, ctx.bias, ctx.how = weight, bias, how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        geometry, _, lane, reorder, owned, remake, masked = ctx.how
        x, arranged, g = _behind(ctx, g, lane, owned=owned, masked=masked)
        x = x if remake is None else remake()
        g = g.contiguous(memory_format=torch.channels_last)
        shape = (None, geometry.stride, geometry.padding, geometry.dilation, False, (0, 0), geometry.groups)
        back = torch.ops.aten.convolution_backward

        def weight_gradient() -> torch.Tensor:
            if ctx.folded:
                return folded_weight_gradient(g, x, arranged.shape[2])
            gradient: torch.Tensor = back(g, x, arranged, *shape, (False, True, False))[1]
            return gradient

        since = lane.moment()  # all that follows waits for the input's gradient: it is launched first, and has the GPU first
        dx = back(g, x, arranged, *shape, (True, False, False))[0] if ctx.needs_input_grad[0] else None
        _aside(lane, ctx.weight, reorder, weight_gradient, g, x, since=since)
        return dx, *[None] * 9


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arranged: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        relu, _, _, bias_reorder, _ = how
        shift = bias if bias is None or bias_reorder is None else bias_reorder(bias)
        if relu and shift is not None and x.is_cuda:
            y = torch._addmm_activation(shift, x, arranged.t())
        else:
            y = functional.linear(x, arranged, shift)
            y = y.relu_() if relu else y
        ctx.save_for_backward(x, arranged, y if relu else None)
        ctx.weight, ctx.bias, ctx.how = weight, bias, how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        _, lane, reorder, bias_reorder, owned = ctx.how
        x, arranged, g = _behind(ctx, g, lane, bias_reorder, owned=owned)
        g = g.contiguous()
        since = lane.moment()
        dx = g @ arranged if ctx.needs_input_grad[0] else None
        if reorder is None:
            _aside(lane, ctx.weight, None, lambda: dense_weight_gradient(g, x) if is_small(g, x) else g.t() @ x, g, x, since=since)
        else:  # its copy of the weight has done its duty, and makes room for the gradient
            _aside(lane, ctx.weight, reorder, lambda: torch.mm(g.t(), x, out=arranged), g, x, arranged)
        return dx, *[None] * 8


def _aside(
    lane: Lane,
    weight: torch.Tensor,
    reorder: Reorder | Transposition | None,
    compute: Callable[[], torch.Tensor],
    *reads: torch.Tensor,
    since: Any = None,
) -> None:
    """Let the lane compute a weight's gradient, if there is to be one, from that of the arranged weight."""

    def work() -> None:
        gradient = compute()
        lane.give(weight, gradient if reorder is None else reorder.back(gradient, weight))

    if weight.requires_grad:
        lane.run(work, *reads, since=since)


def _behind(
    ctx: Any, g: torch.Tensor, lane: Lane, reorder: Transposition | None = None, *, owned: bool, masked: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, arranged weight, and the gradient behind the ReLU, if there is one; that of the bias goes to the lane.

    What the ReLU gave is not needed any longer: its memory is free for what follows.
    """
    x, arranged, z = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    wanted = ctx.bias is not None and ctx.bias.requires_grad and not masked
    if z is not None:
        g, bias_grad = bias_relu_backward(g, z, owned=owned)
    elif wanted:
        bias_grad = bias_gradient(g)
    if wanted:
        lane.give(ctx.bias, bias_grad if reorder is None else reorder.back(bias_grad, ctx.bias))
    return x, arranged, g


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,))
