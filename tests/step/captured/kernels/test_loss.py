import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.step.captured.kernels.loss import cross_entropy, reconstruction_loss, unit
from deepex.task.classify import Classify
from deepex.task.reconstruct import Reconstruct
from tests.full import examples
from tests.step.captured.kernels.conftest import DEVICE, distance, tolerance

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**31)


def _reference_reconstruction(logits: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    exact = logits.detach().double().cpu().requires_grad_()
    target = images.double().cpu()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(exact, target, reduction="sum") / len(target)
    loss.backward()
    assert exact.grad is not None
    return loss.detach(), (exact.detach().sigmoid() - target).square().flatten(1).mean(1).sum(), exact.grad


@settings(max_examples=examples(4, 12))
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 30), st.integers(1, 30)),
    dtype=DTYPES,
    scale=st.sampled_from([0.1, 3.0, 60.0]),
    seed=SEEDS,
    last=st.booleans(),
)
def test_reconstruction(shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int, last: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=random) * scale).to(DEVICE, dtype)
    images = torch.rand(shape, generator=random).to(DEVICE)
    if last:
        logits = logits.contiguous(memory_format=torch.channels_last)
    logits.requires_grad_()
    loss, tally = reconstruction_loss(logits, images)
    expected_loss, expected_tally, expected_gradient = _reference_reconstruction(logits, images)
    assert (loss.dtype, tally.dtype) == (torch.float32, torch.float32)
    assert (loss.requires_grad, tally.requires_grad) == (True, False)
    assert distance(loss.detach(), expected_loss) < 1e-5
    # of a pixel that is nearly right, the error is the difference of two rounded numbers of size 1
    assert distance(tally, expected_tally, least=0.01) < 1e-5
    assert distance(tally, Reconstruct().measure_sums(logits, images, images)[0], least=0.01) < 1e-5
    (3 * loss).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert distance(logits.grad, 3 * expected_gradient) < tolerance(dtype)


def test_a_sure_and_right_logit_costs_little_but_not_nothing() -> None:
    logits = torch.full((1, 1, 4, 4), 30.0, device=DEVICE)
    loss, _ = reconstruction_loss(logits, torch.ones_like(logits))
    assert distance(loss, 16 * torch.tensor(-30.0, dtype=torch.float64).exp()) < 1e-5


@settings(max_examples=examples(4, 12))
@given(rows=st.integers(1, 70), classes=st.one_of(st.integers(2, 40), st.sampled_from([100, 1000, 3001])), dtype=DTYPES, seed=SEEDS)
def test_cross_entropy(rows: int, classes: int, dtype: torch.dtype, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    # few values, so that there are equal maxima
    logits = (torch.randint(-12, 12, (rows, classes), generator=random) / 4).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, classes, (rows,), generator=random).to(DEVICE)
    loss, wrong = cross_entropy(logits, labels)
    exact = logits.detach().double().cpu().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels.cpu())
    (expected / 2).backward()
    assert exact.grad is not None
    assert (loss.dtype, wrong.dtype, wrong.requires_grad) == (torch.float32, torch.int64, False)
    assert distance(loss.detach(), expected.detach()) < 1e-5
    assert int(wrong) == int(Classify().measure_sums(logits.cpu(), labels.cpu(), labels.cpu())[0])
    (loss / 2).backward()
    assert logits.grad is not None
    assert distance(logits.grad, exact.grad) < tolerance(dtype)


def test_the_largest_number_of_classes_and_one_more() -> None:
    logits = torch.randn(2, 32_768, device=DEVICE)
    labels = torch.tensor([5, 32_767], device=DEVICE)
    loss, wrong = cross_entropy(logits, labels)
    assert distance(loss, torch.nn.functional.cross_entropy(logits.double(), labels)) < 1e-5
    assert int(wrong) == 2
    with pytest.raises(ValueError, match="32769 classes"):
        cross_entropy(torch.randn(2, 32_769, device=DEVICE), labels)


def test_large_logits_overflow_nothing() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [1e38, 1e38, -1e38]], device=DEVICE, requires_grad=True)
    loss, wrong = cross_entropy(logits, torch.tensor([0, 1], device=DEVICE))
    loss.backward()
    assert distance(loss.detach(), torch.tensor(2.0).log() / 2) < 1e-5
    assert int(wrong) == 1
    assert torch.equal(logits.grad.cpu(), torch.tensor([[0.0, 0, 0], [0.25, -0.25, 0]]))


def test_the_same_bits_in_every_run_and_no_gradient_unless_wanted() -> None:
    logits, images = torch.randn(3, 1, 28, 28, device=DEVICE), torch.rand(3, 1, 28, 28, device=DEVICE)
    first = reconstruction_loss(logits, images)
    assert not first[0].requires_grad
    assert all(torch.equal(reconstruction_loss(logits, images)[0], first[0]) for _ in range(3))


def test_a_gradient_that_is_known_to_be_one() -> None:
    """Through sums it stays known, and what was multiplied is another."""
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    labels = torch.arange(6, device=DEVICE) % 5
    found = []
    for loss_of in (lambda loss: loss, lambda loss: loss + logits.sum() * 0, lambda loss: 2 * loss):
        for gradient in (unit(logits.device), None):
            logits.grad = None
            loss_of(cross_entropy(logits, labels)[0]).backward(gradient)
            found.append(logits.grad)
    assert all(torch.equal(one, found[0]) for one in found[:4])
    assert all(torch.equal(one, 2 * found[0]) for one in found[4:])
    assert float(unit(logits.device)) == 1.0
