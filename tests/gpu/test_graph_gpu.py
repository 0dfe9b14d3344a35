"""Memsets of captured graphs become kernels that do the same, between the same neighbours."""

from collections.abc import Callable
from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

import pytest
import torch

from deepex.step.captured.graph import _call, replace_memsets

pytestmark = pytest.mark.gpu


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    return graph


def _set(memory: torch.Tensor, value: int = 0, *, bits: int = 8) -> None:
    """Set its elements of so many bits, on the current stream."""
    arguments = {8: c_ubyte, 16: c_ushort, 32: c_uint}[bits](value), c_size_t(memory.nbytes * 8 // bits)
    _call(f"cuMemsetD{bits}Async", c_uint64(memory.data_ptr()), *arguments, c_void_p(torch.cuda.current_stream().cuda_stream))


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 5), (torch.bfloat16, 4097), (torch.uint8, 3), (torch.uint8, 70_001)])
def test_memory_is_set_between_the_same_neighbours(dtype: torch.dtype, count: int) -> None:
    """Added to before, set to zero, added to behind; and beside it, memory that nobody sets."""
    memory = torch.ones(count + 16, dtype=dtype, device="cuda")
    part, before = memory[:count], torch.zeros(count, dtype=dtype, device="cuda")

    def work() -> None:
        memory.add_(2)
        torch.add(part, 0, out=before)
        _set(part)
        memory.add_(5)

    graph = _captured(work)
    assert replace_memsets(graph) == 1
    assert replace_memsets(graph) == 0, "it is a kernel now"
    graph.instantiate()
    for beside in (8, 15):
        graph.replay()
        torch.cuda.synchronize()
        assert part.eq(5).all()
        assert before.eq(3 if beside == 8 else 7).all()
        assert memory[count:].eq(beside).all()


def test_branches_wait_for_what_they_waited_for() -> None:
    """Memory that is set on another stream, for which both streams wait."""
    memory, found = torch.ones(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
    side = torch.cuda.Stream()

    def work() -> None:
        memory.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _set(memory)
        torch.cuda.current_stream().wait_stream(side)
        torch.add(memory, 3, out=found)

    graph = _captured(work)
    assert replace_memsets(graph) == 1
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert found.eq(3).all()


@pytest.mark.parametrize(
    ("bits", "value", "dtype"), [(8, 200, torch.uint8), (16, 40_000, torch.int16), (32, 3_000_000_000, torch.int32)]
)
@pytest.mark.parametrize("count", [64, 61])
def test_other_values_than_zero(bits: int, value: int, dtype: torch.dtype, count: int) -> None:
    memory = torch.zeros(count, dtype=dtype, device="cuda")
    graph = _captured(lambda: _set(memory, value, bits=bits))
    assert replace_memsets(graph) == 1
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert (memory.to(torch.int64) % (1 << bits)).eq(value).all()
