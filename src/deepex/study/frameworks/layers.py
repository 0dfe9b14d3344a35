"""A network of PyTorch as plain layers with their weights, in the form that frameworks with channels last take.

    layers = describe(network, (1, 28, 28))      # raises UnsupportedTask for a layer that has no description
    for layer in walk(layers):
        layer.name, layer.parameters              # {"kernel": (height, width, inputs, outputs), "bias": …}

Frameworks build the same network from it and start from the same weights. Where a dense layer follows feature maps, its rows are
put into the order of flattened maps with channels last. A batch norm keeps PyTorch's settings; the running variance that PyTorch
updates is the unbiased one and that of the others is not, which shows in validation alone, by 1 / (samples · positions).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deepex.arena.mode import evaluating
from deepex.nets.resnet import Residual
from deepex.study.frameworks.base import UnsupportedTask

Array = NDArray[np.float32]
Pair = tuple[int, int]
Sides = tuple[Pair, Pair]  # rows above and below, columns left and right


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. `name` is PyTorch's, with _ for dots; `parameters` are trained, `statistics` are not."""

    name: str
    parameters: dict[str, Array] = field(default_factory=dict)
    statistics: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Convolution(Layer):
    """Its parameters are `kernel` (height, width, inputs, outputs) and perhaps `bias`."""

    stride: Pair
    sides: Sides


@dataclass(frozen=True, kw_only=True)
class Norm(Layer):
    """Batch norm: `scale`, `bias`; `mean`, `var`. `momentum` is the weight of what was before."""

    momentum: float
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Dense(Layer):
    """Its parameters are `kernel` (inputs, outputs) and perhaps `bias`."""


@dataclass(frozen=True, kw_only=True)
class Relu(Layer):
    """The positive part."""


@dataclass(frozen=True, kw_only=True)
class MaxPool(Layer):
    """The largest value in each window; what is beyond the sides never is."""

    window: Pair
    stride: Pair
    sides: Sides


@dataclass(frozen=True, kw_only=True)
class Mean(Layer):
    """The mean of each feature map, which leaves one vector for each sample."""


@dataclass(frozen=True, kw_only=True)
class Flatten(Layer):
    """All values of a sample as one vector; nothing, where they are one already."""


@dataclass(frozen=True, kw_only=True)
class Shortcut(Layer):
    """relu(main(x) + projection(x))."""

    main: "tuple[Layer, ...]"
    projection: "tuple[Layer, ...]"


def describe(network: nn.Module, shape: tuple[int, ...]) -> tuple[Layer, ...]:
    """The layers of a network for samples of `shape` (channels, height, width)."""
    layers = _Reader(network, shape).layers(network, "")
    there = sum(parameter.numel() for parameter in network.parameters())
    if count_parameters(layers) != there:  # shared ones, say
        raise UnsupportedTask(f"a translation has {count_parameters(layers)} of the network's {there} parameters; {_REMEDY}")
    return layers


def walk(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    """Every layer, those within shortcuts too."""
    for layer in layers:
        yield layer
        if isinstance(layer, Shortcut):
            yield from walk(layer.main)
            yield from walk(layer.projection)


def count_parameters(layers: tuple[Layer, ...]) -> int:
    """How many numbers are trained."""
    return sum(array.size for layer in walk(layers) for array in layer.parameters.values())


class _Reader:
    """Translates one module after another; `_maps` is what was flattened last, as (channels, height, width)."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]) -> None:
        self._inputs = _input_shapes(network, shape)
        self._maps: tuple[int, ...] | None = None
        self._known: dict[type[nn.Module], Callable[[Any, str], Layer]] = {
            nn.Conv2d: self._convolution,
            nn.BatchNorm2d: _norm,
            nn.Linear: self._dense,
            nn.ReLU: lambda _, name: Relu(name=name),
            nn.MaxPool2d: self._max_pool,
            nn.AdaptiveAvgPool2d: self._mean,
            nn.Flatten: self._flatten,
            Residual: self._shortcut,
        }

    def layers(self, module: nn.Module, path: str) -> tuple[Layer, ...]:
        """What becomes of a module: several layers of a chain, none of one that does nothing."""
        if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0):
            return ()
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            # Not `named_children`, which leaves out a module that comes a second time.
            below = (
                self.layers(child, f"{path}.{name}".lstrip(".")) for name, child in module._modules.items() if child is not None
            )
            return tuple(layer for layers in below for layer in layers)
        translate = self._known.get(type(module))
        if translate is None:
            raise UnsupportedTask(f"there is no translation of {type(module).__name__} ({path or 'the network'}); {_REMEDY}")
        return (translate(module, path.replace(".", "_")),)

    def _convolution(self, module: nn.Conv2d, name: str) -> Layer:
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        if not plain or isinstance(module.padding, str):
            raise UnsupportedTask(f"there is no translation of the convolution {module} ({name}); {_REMEDY}")
        kernel = _array(module.weight).transpose(2, 3, 1, 0)
        (above, left), stride = _pair(module.padding), _pair(module.stride)
        return Convolution(
            name=name, parameters=_with_bias(kernel, module.bias), stride=stride, sides=((above, above), (left, left))
        )

    def _dense(self, module: nn.Linear, name: str) -> Layer:
        kernel = _array(module.weight).T
        if self._maps is not None:
            channels, height, width = self._maps
            kernel = kernel.reshape(channels, height, width, -1).transpose(1, 2, 0, 3).reshape(kernel.shape)
            self._maps = None
        return Dense(name=name, parameters=_with_bias(kernel, module.bias))

    def _max_pool(self, module: nn.MaxPool2d, name: str) -> Layer:
        if _pair(module.dilation) != (1, 1):
            raise UnsupportedTask(f"there is no translation of {module} ({name}); {_REMEDY}")
        window, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        taken, given = self._inputs[module]
        ends = [
            max(padding[axis], (given[axis + 2] - 1) * stride[axis] + window[axis] - taken[axis + 2] - padding[axis])
            for axis in (0, 1)
        ]
        return MaxPool(name=name, window=window, stride=stride, sides=((padding[0], ends[0]), (padding[1], ends[1])))

    def _mean(self, module: nn.AdaptiveAvgPool2d, name: str) -> Layer:
        if module.output_size not in (1, (1, 1)):
            raise UnsupportedTask(f"there is no translation of {module} ({name}); {_REMEDY}")
        return Mean(name=name)

    def _flatten(self, module: nn.Flatten, name: str) -> Layer:
        taken, _ = self._inputs[module]
        self._maps = taken[1:] if len(taken) == 4 and max(taken[2:]) > 1 else None
        return Flatten(name=name)

    def _shortcut(self, module: Residual, name: str) -> Layer:
        main = self.layers(module.main, f"{name}.main")
        return Shortcut(name=name, main=main, projection=self.layers(module.add.projection, f"{name}.add.projection"))


_REMEDY = "choose lenet, lenet-caffe or a resnet, or compare with pytorch and lightning"


def _norm(module: nn.BatchNorm2d, name: str) -> Layer:
    if not (module.affine and module.track_running_stats and module.momentum is not None):
        raise UnsupportedTask(f"there is no translation of {module} ({name}); {_REMEDY}")
    if not module.training:
        raise UnsupportedTask(f"there is no translation of {module} in evaluation mode ({name}); {_REMEDY}")
    assert module.running_mean is not None
    assert module.running_var is not None
    return Norm(
        name=name,
        parameters={"scale": _array(module.weight), "bias": _array(module.bias)},
        statistics={"mean": _array(module.running_mean), "var": _array(module.running_var)},
        momentum=1 - module.momentum,
        epsilon=module.eps,
    )


def _input_shapes(network: nn.Module, shape: tuple[int, ...]) -> dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes that each module takes and gives, with one sample."""
    found: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and isinstance(inputs[0], torch.Tensor):
            found[module] = (tuple(inputs[0].shape), tuple(output.shape))

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    with evaluating(network), torch.no_grad():
        network(torch.zeros((1, *shape)))
    for hook in hooks:
        hook.remove()
    return found


def _with_bias(kernel: Array, bias: torch.Tensor | None) -> dict[str, Array]:
    return {"kernel": np.ascontiguousarray(kernel)} | ({} if bias is None else {"bias": _array(bias)})


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().float().cpu().numpy().copy()
    return array


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)
