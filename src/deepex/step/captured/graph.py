"""Captured CUDA graphs whose memsets are kernels.

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph): …
    replace_memsets(graph)
    graph.instantiate()

Libraries set counters and workspaces to zero before many of their kernels. In a graph, the device rests for about five microseconds
before such a node and for as long behind it, and for half a microsecond between two kernels: on an H200, 2 to 5 % of a step of
ResNet-50 and 7 % of one of the CVAE. So each memset gives way to a kernel that does the same, between the same neighbours.

torch has no way to change a graph: the driver's functions are called by their names in its library, with its C structures.
"""

import ctypes
import functools
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import torch

from deepex.step.captured.kernels.fill import fill

_KERNEL, _MEMSET = 0, 2  # of CUgraphNodeType
_TYPES: Final = {1: "|u1", 2: "<i2", 4: "<i4"}  # of elements by their bytes


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` lines of `width` elements."""

    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


@dataclass(frozen=True)
class _Memory:
    """A piece of the device's memory, for torch to see as a tensor."""

    address: int
    count: int
    kind: str

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.count,), "typestr": self.kind, "data": (self.address, False), "version": 3}


def replace_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replace them in a graph that is not instantiated yet; gives how many there were. A memset of separate lines stays."""
    raw, count = graph.raw_cuda_graph(), 0
    for node in _nodes(raw):
        if _type(node) != _MEMSET:
            continue
        memset = _Memset()
        _call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
        if memset.height == 1 and memset.element_bytes in _TYPES:
            _replace(raw, node, memset)
            count += 1
    return count


def _replace(raw: int, node: int, memset: _Memset) -> None:
    before, behind = _listed("cuGraphNodeGetDependencies", node), _listed("cuGraphNodeGetDependentNodes", node)
    own, kernel, new = torch.cuda.CUDAGraph(keep_graph=True), _Kernel(), c_void_p()
    out, value = _target(memset)
    with torch.cuda.stream(torch.cuda.Stream()):
        own.capture_begin(capture_error_mode="relaxed")  # the kernel may have to be loaded
        try:
            fill(out, value)
        finally:
            own.capture_end()
    (launch,) = (one for one in _nodes(own.raw_cuda_graph()) if _type(one) == _KERNEL)
    _call("cuGraphKernelNodeGetParams_v2", c_void_p(launch), byref(kernel))
    _call("cuGraphAddKernelNode_v2", byref(new), c_void_p(raw), _array(before), c_size_t(len(before)), byref(kernel))
    assert new.value is not None
    for other in behind:
        _call("cuGraphAddDependencies", c_void_p(raw), _array([new.value]), _array([other]), c_size_t(1))
    _call("cuGraphDestroyNode", c_void_p(node))


def _target(memset: _Memset) -> tuple[torch.Tensor, int]:
    """What to fill, and with what: four bytes at once where they are so many."""
    size, count, value = memset.element_bytes, memset.width, memset.value
    if size == 1 and memset.address % 4 == count % 4 == 0:
        size, count, value = 4, count // 4, value * 0x01010101
    out = torch.as_tensor(_Memory(memset.address, count, _TYPES[size]), device="cuda")
    assert out.data_ptr() == memset.address
    return out, value - (1 << 8 * size) if size > 1 and value >> (8 * size - 1) else value


def _nodes(raw: int) -> list[int]:
    return _listed("cuGraphGetNodes", raw)


def _listed(function: str, of: int) -> list[int]:
    """What a function lists that is asked for the length first."""
    count = c_size_t()
    _call(function, c_void_p(of), None, byref(count))
    found = (c_void_p * count.value)()
    if count.value:
        _call(function, c_void_p(of), found, byref(count))
    return [one for one in found if one is not None]


def _type(node: int) -> int:
    kind = c_int()
    _call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    return kind.value


def _array(nodes: list[int]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def _call(function: str, *arguments: Any) -> None:
    """Call the driver."""
    error = getattr(_driver(), function)(*arguments)
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(c_int(error), byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'unknown error').decode()} ({error})")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
