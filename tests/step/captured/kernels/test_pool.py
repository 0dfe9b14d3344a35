"""Fused max pooling against PyTorch's own in float64, and against its bfloat16 where values tie."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from deepex.step.captured.kernels import activation
from deepex.step.captured.kernels.pool import NormReluPool, ReluPool, max_pool, max_pool_backward
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """A map and a window."""

    batch: int
    channels: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int
    ceil_mode: bool
    dtype: torch.dtype

    @property
    def window(self) -> tuple[int, int, int, bool]:
        return self.kernel, self.stride, self.padding, self.ceil_mode

    def map(self, seed: int = 0, *, levels: int = 0) -> Tensor:
        """Normal values in channels-last order; with `levels`, so few different ones that windows hold ties."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.channels, self.height, self.width)
        values = (
            torch.randint(-levels, levels + 1, shape, generator=generator) if levels else torch.randn(shape, generator=generator)
        )
        return values.to(self.dtype).contiguous(memory_format=torch.channels_last).to(DEVICE)

    def pool(self, v: Tensor) -> Tensor:
        """PyTorch's pooling."""
        return functional.max_pool2d(v, self.kernel, self.stride, self.padding, ceil_mode=self.ceil_mode)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kernel = draw(st.integers(2, 3))
    padding = draw(st.integers(0, kernel // 2))
    height, width = (draw(st.integers(1, 9)) for _ in range(2))
    assume(min(height, width) + 2 * padding >= kernel)
    return Case(
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 3, 8, 20, 32, 72, 96])),
        height,
        width,
        kernel,
        draw(st.integers(1, 3)),
        padding,
        draw(st.booleans()),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


STEM = Case(2, 64, 8, 8, 3, 2, 1, False, torch.bfloat16)
HANGING = Case(1, 96, 8, 6, 3, 2, 0, True, torch.bfloat16)


def error(out: Tensor, reference: Tensor, at_least: float = 1e-30) -> float:
    """‖out − reference‖ / ‖reference‖."""
    return float((out.detach().double().cpu() - reference).norm() / max(float(reference.norm()), at_least))


def vector(case: Case, seed: int) -> Tensor:
    """Quarters, whose sums with whole numbers are exact in bfloat16: Triton's interpreter cuts where a GPU rounds to nearest."""
    return (torch.randint(-7, 8, (case.channels,), generator=torch.Generator().manual_seed(seed)) / 4).to(DEVICE)


def apart(case: Case) -> Tensor:
    """A map whose windows hold no values so close that rounding the norm of them would tie; its means are far from zero.

    Errors are measured relative to the reference: around zero the running mean would be judged by what float32 cannot hold.
    """
    level = torch.randperm(9, generator=torch.Generator().manual_seed(5)).reshape(3, 3) + 2
    levels = level.repeat(5, 5)[: case.height, : case.width].to(DEVICE)
    return (levels + case.map(1).float().tanh() * 0.3).to(case.dtype).contiguous(memory_format=torch.channels_last)


@settings(max_examples=examples(2, 4))
@given(cases())
@example(STEM)
@example(HANGING)
def test_plain_pooling_and_its_gradient_are_torchs_also_where_values_tie(case: Case) -> None:
    y = case.map(levels=2).requires_grad_()
    reference = y.detach().cpu().requires_grad_()
    pooled, expected = ReluPool.apply(y, None, False, *case.window), case.pool(reference)
    assert torch.equal(pooled.cpu(), expected)
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    g = torch.randint(-4, 5, expected.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)  # sums are exact
    pooled.backward(g.to(DEVICE))
    expected.backward(g)
    assert torch.equal(y.grad.cpu(), reference.grad)


@settings(max_examples=examples(2, 4))
@given(cases(), st.booleans())
@example(STEM, True)
@example(HANGING, True)
def test_bias_and_relu_in_front(case: Case, relu: bool) -> None:
    y, bias = case.map(levels=3).requires_grad_(), vector(case, 1).requires_grad_()
    exact_y, exact_bias = (x.detach().cpu().double().requires_grad_() for x in (y, bias))
    v = exact_y + exact_bias[:, None, None]
    expected = case.pool(v.relu() if relu else v)
    pooled = ReluPool.apply(y, bias, relu, *case.window)
    assert torch.equal(pooled.double().cpu(), expected)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    pooled.backward(g.to(DEVICE))
    expected.backward(g.double())
    assert error(y.grad, exact_y.grad) < BOUND[case.dtype]
    assert error(bias.grad, exact_bias.grad, at_least=0.01 * float(g.double().norm())) < 1e-5


@pytest.mark.slow
@settings(max_examples=examples(2, 4))
@given(cases())
@example(STEM)
@example(HANGING)
def test_norm_relu_and_pooling(case: Case) -> None:
    assume(case.batch * case.height * case.width >= 8)
    y = apart(case).requires_grad_()
    gamma, beta = vector(case, 1), vector(case, 2).requires_grad_()
    gamma = (gamma.sign() + gamma).requires_grad_()
    norm = nn.BatchNorm2d(case.channels, device=DEVICE)
    running = [norm.running_mean, norm.running_var]
    leaves = [x.detach().cpu().double().requires_grad_() for x in (y, gamma, beta)]
    expected_running = [x.cpu().double() for x in running]
    v = functional.batch_norm(leaves[0], *expected_running, *leaves[1:], training=True, momentum=0.1, eps=1e-5)
    expected = case.pool(v.relu())
    pooled = NormReluPool.apply(y, gamma, beta, norm, *case.window)
    bound = BOUND[case.dtype]
    assert error(pooled, expected.detach()) < bound
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(case.dtype)
    pooled.backward(g.to(DEVICE))
    expected.backward(g.double())
    for ours, exact in zip((y, gamma, beta), leaves, strict=True):
        assert error(ours.grad, exact.grad, at_least=0.01 * float(g.double().norm())) < bound
    for ours, exact in zip(running, expected_running, strict=True):
        assert error(ours, exact) < 1e-5


def test_windows_of_negatives_pass_nothing_and_ties_go_to_the_first() -> None:
    y = -torch.ones(1, 8, 4, 4, device=DEVICE)
    y[:, :, 2:, 2:] = 1
    pooled, where = max_pool(y, 2, 2, relu=True)
    assert where[0, 0].tolist() == [[-1, -1], [-1, 0]]
    assert pooled[0, 0].tolist() == [[0, 0], [0, 1]]
    gradient, sums = max_pool_backward(torch.ones_like(pooled), where, (4, 4), 2, 2, 0, bias=True)
    assert gradient[0, 0].nonzero().tolist() == [[2, 2]]
    assert sums is not None
    assert sums.tolist() == [1.0] * 8


def test_values_that_tie_after_rounding_go_to_the_first() -> None:
    y = torch.tensor([[1.0, 1.0078125], [0.0, 0.0]], dtype=torch.bfloat16, device=DEVICE)[None, None]
    bias, one = torch.full((1,), 512.0, device=DEVICE), torch.ones(1, device=DEVICE)
    assert max_pool(y, 2, 2)[1].item() == 1
    assert max_pool(y, 2, 2, bias=bias, relu=True)[1].item() == 0  # 513 and 513.0078125 are 512
    assert max_pool(y, 2, 2, scale=one, shift=bias, relu=True)[1].item() == 0
    assert max_pool(y.float(), 2, 2, bias=bias, relu=True)[1].item() == 1


def test_not_a_number_and_minus_infinity_are_passed_on() -> None:
    y = torch.full((1, 1, 4, 4), float("-inf"), device=DEVICE)
    y[0, 0, 3, 3] = float("nan")
    pooled, where = max_pool(y, 3, 3, 1)
    assert pooled[0, 0, 0, 0] == float("-inf")
    assert pooled[0, 0, 1, 1].isnan()
    assert where[0, 0, 0, 0] == 4  # the first place inside the map


def test_sums_of_many_programs_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "at_once", lambda _parts: 4)  # fewer than programs
    case = Case(1, 64, 16, 18, 2, 2, 0, False, torch.float32)
    y, bias, g = case.map(), vector(case, 1), torch.randn(1, 64, 8, 9, device=DEVICE)
    _, where = max_pool(y, *case.window, bias=bias, relu=True)
    first, again = (max_pool_backward(g, where, (16, 18), 2, 2, 0, bias=True)[1] for _ in range(2))
    exact = (g.double() * (where >= 0)).sum((0, 2, 3))
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)
    assert error(first, exact.cpu()) < 1e-5


def test_a_window_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel 3"):
        max_pool(torch.zeros(1, 1, 2, 2, device=DEVICE), 3, 1)
