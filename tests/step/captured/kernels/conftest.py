"""The kernels run on the GPU where there is one; elsewhere Triton interprets them."""

from collections.abc import Iterator

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN, so that what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def bf16_by_other_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bf16 PyTorch would try it with oneDNN, and then leave that switched off for tests that compare bits."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def distance(out: torch.Tensor, reference: torch.Tensor, least: float = 1e-30) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; NaN if anything of `out` is.

    `least` stands in for a smaller ‖reference‖: a sum of a few numbers of size 1 may cancel, their rounding does not.
    """
    reference = reference.double().cpu()
    return float((out.double().cpu() - reference).norm() / reference.norm().clamp_min(least))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def randn(*shape: int, seed: int) -> torch.Tensor:
    """In bf16; maps in channels-last order."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made
