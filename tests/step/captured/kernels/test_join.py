import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.step.captured.kernels.join import can_join, join
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE


def _maps(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return made.contiguous(memory_format=torch.channels_last)


@settings(max_examples=examples(4, 15))
@given(
    batch=st.integers(1, 3),
    counts=st.lists(st.one_of(st.sampled_from([1, 8, 16, 24, 64, 80]), st.integers(1, 140)), min_size=2, max_size=8),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_lie_side_by_side(batch: int, counts: list[int], size: tuple[int, int], dtype: torch.dtype) -> None:
    maps = [_maps((batch, count, *size), dtype, seed).requires_grad_() for seed, count in enumerate(counts)]
    assert can_join(maps)
    joined = join(maps)
    assert torch.equal(joined, torch.cat(maps, dim=1))
    assert joined.is_contiguous(memory_format=torch.channels_last)
    g = _maps(tuple(joined.shape), dtype, 99)
    found = torch.autograd.grad(joined, maps, g)
    assert all(torch.equal(one, other) for one, other in zip(found, g.split(counts, dim=1), strict=True))


def test_gradients_are_slices_of_the_whole_one() -> None:
    maps = [_maps((2, count, 3, 4)).requires_grad_(count != 8) for count in (16, 8, 24)]
    g = _maps((2, 48, 3, 4))
    seen = []
    for part in maps:
        if part.requires_grad:
            part.register_hook(lambda d: seen.append((d.data_ptr() - g.data_ptr(), d.stride(), tuple(d.shape))))
    join(maps).backward(g)
    assert sorted(seen) == [(0, g.stride(), (2, 16, 3, 4)), (24 * g.element_size(), g.stride(), (2, 24, 3, 4))]
    assert maps[1].grad is None


def test_a_gradient_in_another_order_is_reordered_once() -> None:
    maps = [_maps((2, 8, 3, 4), seed=seed).requires_grad_() for seed in range(3)]
    g = torch.randn(2, 24, 3, 4, device=DEVICE)
    first, second, third = torch.autograd.grad(join(maps), maps, g)
    assert first.stride() == second.stride() == third.stride() == (288, 1, 96, 24)
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert torch.equal(second, g[:, 8:16])


@pytest.mark.parametrize(
    "others",
    [
        [],
        [_maps((2, 8, 3, 4))] * 8,
        [_maps((2, 8, 4, 3))],
        [_maps((2, 8, 3, 4), torch.bfloat16)],
        [torch.randn(2, 8, 3, 4, device=DEVICE)],
        [torch.randn(2, 8, 3, device=DEVICE)],
        [_maps((2, 8, 3, 4)).int()],
    ],
)
def test_what_the_kernel_does_not_take(others: list[torch.Tensor]) -> None:
    assert not can_join([_maps((2, 8, 3, 4)), *others])
