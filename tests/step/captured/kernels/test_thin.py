from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from deepex.step.captured.kernels.thin import (
    thin_input_convolution,
    thin_input_forward,
    thin_input_gradients,
    thin_output_convolution,
    thin_output_forward,
    thin_output_gradients,
)
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance, tolerance


@dataclass(frozen=True)
class Case:
    """The sizes of a layer, and the seed of its numbers."""

    n: int
    taps: tuple[int, int]  # thin channels, and the side of the window
    wide: int
    height: int
    width: int
    dtype: torch.dtype
    bias: bool
    seed: int

    @property
    def thin(self) -> int:
        return self.taps[0]

    @property
    def side(self) -> int:
        return self.taps[1]

    def randn(self, *shape: int, salt: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + salt)).to(DEVICE)

    def maps(self, channels: int, salt: int) -> torch.Tensor:
        made = self.randn(self.n, channels, self.height, self.width, salt=salt).to(self.dtype)
        return made.contiguous(memory_format=torch.channels_last)

    def weight(self, *shape: int) -> torch.Tensor:
        """float32 numbers that bf16 has too, so that both sides of a comparison have the same."""
        return self.randn(*shape, self.side, self.side, salt=2).bfloat16().float().requires_grad_()


CASES = st.builds(
    Case,
    n=st.integers(1, 2),
    taps=st.sampled_from([(1, 3), (2, 3), (3, 3), (4, 3), (1, 5), (2, 5), (1, 7)]),
    wide=st.sampled_from([16, 48, 144]),
    height=st.integers(1, 9),  # windows of 7 fit in, or hang over
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().cpu().requires_grad_()


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@settings(max_examples=examples(4, 12) if DEVICE == "cpu" else 5)  # every size is compiled anew
@given(case=CASES, wide=st.sampled_from([1, 6, 16, 20, 50, 144]), relu=st.booleans(), data=st.data())
def test_into_a_wide_map(case: Case, wide: int, relu: bool, data: st.DataObject) -> None:
    # the window has to fit into the padded images
    least = max(0, (case.side - min(case.height, case.width) + 1) // 2)
    padding = data.draw(st.one_of(st.none(), st.integers(least, case.side // 2)), label="padding")
    case = replace(case, wide=wide)
    images, weight = case.maps(case.thin, 1), case.weight(case.wide, case.thin)
    bias = case.randn(case.wide, salt=3).requires_grad_() if case.bias else None
    out = thin_input_convolution(images, weight, bias, relu, padding=padding)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == case.dtype
    exact_weight, exact_bias = _exact(weight), None if bias is None else _exact(bias)
    pad = case.side // 2 if padding is None else padding
    reference = functional.conv2d(images.double().cpu(), exact_weight, exact_bias, padding=pad)
    reference = reference.relu() if relu else reference
    assert distance(out.detach(), reference.detach(), least=1.0) < tolerance(case.dtype)
    g = case.randn(*out.shape, salt=4).to(case.dtype)
    out.backward(g)
    # where rounding moves an output across zero, the ReLU has another gradient: take the kernel's own mask
    mask = (out.detach() > 0).cpu() if relu else torch.ones(reference.shape)
    before = functional.conv2d(images.double().cpu(), exact_weight, exact_bias, padding=pad)
    before.backward(g.double().cpu() * mask)
    assert distance(_grad(weight), _grad(exact_weight), least=1.0) < 1e-5
    if bias is not None and exact_bias is not None:
        assert distance(_grad(bias), _grad(exact_bias), least=1.0) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [5, 64, 128, 200])
def test_the_bits_of_what_a_relu_let_through(wide: int, dtype: torch.dtype) -> None:
    """In blocks of all sizes, and in several: the same gradients as of one that was stopped before, but for the order of sums."""
    torch.manual_seed(wide)
    images = torch.randn(2, 1, 5, 6, device=DEVICE).to(dtype)
    weight, bias = torch.randn(wide, 1, 3, 3, device=DEVICE), torch.randn(wide, device=DEVICE)
    out, passed = thin_input_forward(images, weight, bias, relu=True)
    assert passed is not None
    g = torch.randn_like(out)
    for bits, whole in zip(
        thin_input_gradients(g, passed, images, 3), thin_input_gradients(g * (out > 0), None, images, 3), strict=True
    ):
        assert distance(bits, whole, least=1.0) < 1e-5  # one that is let through wrongly moves a sum by far more


@pytest.mark.slow
@settings(max_examples=examples(3, 8) if DEVICE == "cpu" else 4)
@given(case=CASES, transposed=st.booleans(), masks=st.booleans(), narrow=st.booleans())
def test_out_of_a_wide_map(case: Case, transposed: bool, masks: bool, narrow: bool) -> None:
    x = (case.maps(case.wide, 1).relu() if masks else case.maps(case.wide, 1)).requires_grad_()
    weight = case.weight(case.wide, case.thin) if transposed else case.weight(case.thin, case.wide)
    bias = case.randn(case.thin, salt=3).requires_grad_() if case.bias else None
    dtype = case.dtype if narrow else torch.float32
    sums: list[torch.Tensor] = []
    out = thin_output_convolution(x, weight, bias, transposed, dtype=dtype, masks=sums.append if masks else None)
    assert out.dtype == dtype
    exact_x, exact_weight, exact_bias = _exact(x), _exact(weight), None if bias is None else _exact(bias)
    convolve = functional.conv_transpose2d if transposed else functional.conv2d
    reference = convolve(exact_x, exact_weight, exact_bias, padding=case.side // 2)
    assert distance(out.detach(), reference.detach(), least=1.0) < tolerance(dtype)
    g = case.maps(case.thin, 4).to(dtype)
    out.backward(g)
    reference.backward(g.double().cpu())
    expected = _grad(exact_x) * (exact_x > 0) if masks else _grad(exact_x)
    assert _grad(x).dtype == case.dtype
    assert distance(_grad(x), expected, least=1.0) < tolerance(case.dtype)
    assert distance(_grad(weight), _grad(exact_weight), least=1.0) < 1e-5
    if bias is not None and exact_bias is not None:
        assert distance(_grad(bias), _grad(exact_bias), least=1.0) < 1e-5
    assert len(sums) == masks
    if masks:
        assert distance(sums[0], expected.sum((0, 2, 3)), least=1.0) < 1e-5


@pytest.mark.parametrize("transposed", [True, False])
def test_images_in_several_bands_and_wide_maps_in_several_blocks(transposed: bool) -> None:
    x = torch.randn(1, 272, 20, 9, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(272, 2, 3, 3, device=DEVICE)
    weight = weight if transposed else weight.transpose(0, 1)
    convolve = functional.conv_transpose2d if transposed else functional.conv2d
    out = thin_output_forward(x, weight, None, transposed=transposed)
    assert distance(out, convolve(x.double(), weight.double(), padding=1), least=1.0) < 1e-5


def test_the_same_bits_in_every_run() -> None:
    case = Case(n=3, taps=(1, 3), wide=48, height=11, width=9, dtype=torch.bfloat16, bias=True, seed=7)
    x, g, weight = case.maps(48, 1), case.maps(1, 2), case.weight(48, 1).detach()
    maps = x.clone(), x.clone()
    first, again = (thin_output_gradients(g, some, weight, transposed=True, masks=True) for some in maps)
    assert first[0].data_ptr() == maps[0].data_ptr(), "the gradient lies where x did"
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("masks", [False, True])
def test_what_nobody_wrote_is_not_added_up(masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that starts as numbers whose sum overflows, which the interpreter warns of."""
    case = Case(n=2, taps=(1, 3), wide=16, height=5, width=6, dtype=torch.float32, bias=False, seed=3)
    x, g, weight = case.maps(16, 1).relu(), case.maps(1, 2), case.weight(16, 1).detach()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(3e38))
    found = thin_output_gradients(g, x, weight, transposed=True, masks=masks)
    assert all(bool((one.abs() < 1e6).all()) for one in found if one is not None)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    images = torch.randn(1, 1, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="multiple of 16"):
        thin_output_convolution(torch.randn(1, 20, 4, 4, device=DEVICE), torch.randn(20, 1, 3, 3, device=DEVICE), None, True)
    with pytest.raises(ValueError, match="padding 2"):
        thin_input_convolution(images, torch.randn(16, 1, 3, 3, device=DEVICE), None, True, padding=2)
    with pytest.raises(ValueError, match="has to fit"):
        thin_input_convolution(images, torch.randn(16, 1, 5, 5, device=DEVICE), None, True, padding=0)
    with pytest.raises(ValueError, match="window 4"):
        thin_input_convolution(images, torch.randn(16, 1, 4, 4, device=DEVICE), None, True)
    with pytest.raises(ValueError, match="weight is for 2"):
        thin_input_convolution(images, torch.randn(16, 2, 3, 3, device=DEVICE), None, True)
    with pytest.raises(ValueError, match="up to 4"):
        thin_output_convolution(images, torch.randn(16, 5, 3, 3, device=DEVICE), None, True)
    with pytest.raises(ValueError, match="63 elements"):
        thin_output_convolution(images, torch.randn(16, 2, 7, 7, device=DEVICE), None, True)
    with pytest.raises(AssertionError, match="network's input"):
        thin_input_convolution(images.requires_grad_(), torch.randn(16, 1, 3, 3, device=DEVICE), None, True)
