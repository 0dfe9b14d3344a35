import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.step.captured.kernels.fork import fork, total
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 6, 16, 72]), st.integers(1, 7), st.integers(1, 7))
KINDS = st.lists(st.sampled_from(["last", "slice", "first", "spread", "constant", "none"]), min_size=1, max_size=11)


def _gradient(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor | None:
    n, channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    if kind == "slice":  # some channels of wider maps
        wide = torch.randn((n, channels + 24, height, width), generator=generator).to(DEVICE, dtype)
        return wide.contiguous(memory_format=torch.channels_last)[:, 8 : 8 + channels]
    if kind == "spread":  # the same number everywhere, as behind an average
        return torch.randn((n, channels, 1, 1), generator=generator).to(DEVICE, dtype).expand(shape)
    if kind == "constant":
        return torch.randn((channels, 1, 1), generator=generator).to(DEVICE, dtype).expand(shape)
    made = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return made.contiguous(memory_format=torch.channels_last) if kind == "last" else made


@settings(max_examples=examples(4, 15))
@given(shape=SHAPES, kinds=KINDS, dtype=DTYPES, seed=st.integers(0, 2**31))
def test_the_total_of_gradients(shape: tuple[int, ...], kinds: list[str], dtype: torch.dtype, seed: int) -> None:
    gradients = [_gradient(kind, shape, dtype, seed + place) for place, kind in enumerate(kinds)]
    there = [g for g in gradients if g is not None]
    out = total(gradients)
    if len(there) < 2:
        assert out is (there[0] if there else None)
        return
    assert out is not None
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    expected = torch.stack([g.double() for g in there]).sum(0)
    least = sum(float(g.double().norm()) for g in there)  # they may cancel, their rounding does not
    rounding = 2**-8 if DEVICE == "cuda" else 2**-7  # of bf16; the interpreter cuts off what a GPU rounds
    assert distance(out, expected, least=least) < 1e-6 + (0 if dtype == torch.float32 else rounding)


def test_bf16_is_rounded_once() -> None:
    gradients = [torch.full((1, 8, 2, 2), value, dtype=torch.bfloat16, device=DEVICE) for value in (256.0, 1.0, 1.0, -256.0)]
    found = total(gradients)
    assert found is not None
    assert torch.equal(found, torch.full_like(found, 2.0))


def test_users_share_the_memory_and_their_gradients_come_apart() -> None:
    x = torch.randn(2, 16, 3, 5, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    forked = fork(x, 3)
    assert all(one.data_ptr() == x.data_ptr() and one.stride() == x.stride() and not one._is_view() for one in forked)
    (forked[0] * 2 + forked[2].square()).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 + 2 * x.detach())


def test_a_single_gradient_is_passed_on_as_it_is() -> None:
    x = torch.randn(2, 16, 3, 5, device=DEVICE, requires_grad=True)
    g = torch.randn(2, 16, 3, 5, device=DEVICE)
    (found,) = torch.autograd.grad(fork(x, 4)[2], x, g)
    assert found.data_ptr() == g.data_ptr()
