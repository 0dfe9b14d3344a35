"""Compiles every kernel for a GPU on a machine without one, as its callers launch it; prints the names, and what went wrong.

The interpreter forgives what the compiler does not: types that differ between branches, sizes that are no powers of two. Started as
a process of its own, because whether kernels are interpreted is settled when they are defined.
"""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget

import deepex.step.captured.kernels as package
from deepex.arena.arena import Arena
from deepex.record.clock import FORWARD
from deepex.step.captured.kernels import (
    dense,
    division,
    fill,
    folded,
    fork,
    join,
    loss,
    noise,
    normalise,
    pool,
    response,
    stamp,
    thin,
    transpose,
    update,
)
from deepex.step.captured.kernels.activation import bias_relu_backward
from deepex.step.captured.kernels.dropout import Dropout
from deepex.step.captured.kernels.take import Taker

CPU = torch.device("cpu")
LEAST_SHARED_BYTES = 99 * 1024  # what a program may have on GPUs for desktops; an H200 has 227 KB
KEY = torch.zeros(1, dtype=torch.int64)


class NoGpu:
    """A driver for the compiler to ask for its target: an H200. Nothing is ever launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def is_active(self) -> bool:
        return True


def maps(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.zeros(shape, dtype=dtype)
    return (made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made).requires_grad_()


def back(output: torch.Tensor) -> None:
    output.backward(torch.zeros_like(output))


def callers(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls that launch all kernels between them."""
    x, norm, other = maps(4, 64, 32, 32, dtype=dtype), nn.BatchNorm2d(64), nn.BatchNorm2d(64)
    few = maps(2, 64, 8, 8, dtype=dtype)
    yield lambda: [back(normalise.normalise_add(y, norm, y * 1, other, relu=True)[0]) for y in (x, few)]
    yield lambda: back(pool.NormReluPool.apply(x, norm.weight, norm.bias, norm, 3, 2, 1, False))
    yield lambda: back(pool.ReluPool.apply(x, maps(64, dtype=dtype), True, 2, 2, 0, False))
    yield lambda: back(response.LocalResponse.apply(x, 5, 1e-4, 0.75, 1.0))
    yield lambda: back(Dropout.apply(x, 0.5, KEY, 1, True))
    yield lambda: back(join.join([x, x * 1]))
    yield lambda: fork.total([x.detach(), x.detach()])
    yield lambda: bias_relu_backward(x.detach(), x.detach())
    yield lambda: fill.fill(torch.zeros(10, dtype=torch.int32), 0)
    yield lambda: noise.noise_like(x.detach(), KEY, 1)
    images, wide = torch.zeros(4, 1, 28, 28, dtype=dtype), maps(4, 128, 28, 28, dtype=dtype)
    yield lambda: back(thin.thin_input_convolution(images, maps(128, 1, 3, 3, dtype=dtype), maps(128, dtype=dtype), True))
    yield lambda: back(thin.thin_output_convolution(wide, maps(128, 1, 3, 3, dtype=dtype), maps(1, dtype=dtype), True))
    widest = maps(4, 512, 9, 9, dtype=dtype)
    yield lambda: thin.thin_output_forward(widest.detach(), maps(512, 4, 3, 3, dtype=dtype).detach(), None, transposed=True)
    squares, outputs = torch.zeros(2, 16, 35, 35, dtype=dtype), torch.zeros(2, 64, 32, 32, dtype=dtype)
    yield lambda: folded.folded_forward(squares, torch.zeros(64, 16, 4, 4, dtype=dtype), torch.zeros(64, dtype=dtype))
    yield lambda: folded.folded_weight_gradient(outputs, squares, 4)
    yield lambda: dense.dense_weight_gradient(torch.zeros(128, 27, dtype=dtype), torch.zeros(128, 2048, dtype=dtype))
    logits, labels = maps(4, 10, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    yield lambda: loss.cross_entropy(logits, labels)[0].backward(loss.unit(CPU))
    yield lambda: back(loss.reconstruction_loss(images.clone().requires_grad_(), images.float())[0])
    weight = torch.zeros(6, 12, dtype=dtype)
    yield lambda: (
        transpose.Transposition(rows=3, columns=4, outer=6)(weight),
        transpose.Transposition(rows=2, columns=3, inner=12)(weight),
    )
    yield lambda: transpose.gather(weight.flatten(), torch.zeros(5, dtype=torch.int32))
    yield lambda: _updates(dtype)
    yield lambda: stamp.StampClock(CPU).mark(FORWARD)
    yield lambda: Taker(
        images=torch.zeros(4, 28, 28, 3, dtype=torch.uint8), labels=labels, order=labels, key=KEY, factor=torch.ones(3),
        offset=torch.zeros(3), size=(28, 28), pad=4, flip=True, fold=2, border=3, kernel=7,
    ).take(torch.zeros(1, 2, dtype=torch.int64), KEY, 4, dtype)  # fmt: skip


def _updates(dtype: torch.dtype) -> None:
    arena = Arena(nn.Linear(8, 8), CPU, gathers=True, moves=False)
    table = update.Gradients(arena, decays=True)
    table.point([torch.zeros_like(weight, dtype=dtype) for weight in arena.trainable])
    table.gather(arena.gradients)
    shadow = torch.zeros_like(arena.weights, dtype=torch.bfloat16)
    update.update(table, arena, shadow, torch.zeros(1), KEY, momentum=0.9, decay=0.1, nesterov=True)
    update.finish_kernel[(1,)](torch.zeros(2, dtype=torch.float64), torch.zeros(()), KEY, KEY, 4.0, num_warps=1)


def known() -> set[str]:
    """All kernels that there are."""
    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    kernels = [(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")]
    return {f"{module.__name__}.{name}" for module, name in kernels if vars(module)[name].__module__ == module.__name__}


def main() -> None:
    triton.runtime.driver.set_active(NoGpu())
    division._INTERPRETED_PROCESSORS = 132
    compiled, failed = set(), {}
    real = triton.runtime.JITFunction.run

    def compile_only(self: Any, *inputs: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{self.__module__}.{self.fn.__name__}"
        try:
            made = real(self, *inputs, grid=grid, warmup=True, **options)
            compiled.add(name)
            assert ".visible .entry" in made.asm["ptx"]
            assert made.metadata.shared <= LEAST_SHARED_BYTES, "too much shared memory"
        except Exception as error:  # noqa: BLE001 - to be told
            failed[name] = f"{type(error).__name__}: {error}"

    triton.runtime.JITFunction.run = compile_only
    for call in callers(torch.bfloat16):
        call()
    Path(sys.argv[1]).write_text(json.dumps({"compiled": sorted(compiled), "known": sorted(known()), "failed": failed}))


if __name__ == "__main__":
    main()
