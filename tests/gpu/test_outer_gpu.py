"""The outer step on a GPU: what is captured and replayed is what would be launched, and is close to float64's."""

import pytest
import torch

from deepex.sync.outer import Muon, Trust
from deepex.sync.region import Place

pytestmark = pytest.mark.gpu
MATRICES = [Place(0, 64, 576), Place(40_000, 256, 64), Place(60_000, 64, 256), Place(80_000, 27, 512)]
COUNT = 100_000


@pytest.mark.parametrize("kind", [Muon, Trust])
def test_replayed_steps_are_those_that_would_be_launched(kind: type[Muon] | type[Trust]) -> None:
    start = torch.randn(COUNT, device="cuda")
    changes = [1e-3 * torch.randn(COUNT, device="cuda") for _ in range(5)]
    lasts = [start.clone(), start.clone()]
    steps = [kind(start, rate=0.03, momentum=0.9, matrices=MATRICES) for _ in lasts]
    change = torch.empty_like(start)
    for given in changes:
        steps[0].move(lasts[0], change.copy_(given), 0.1)
        steps[1].launch(lasts[1], given.clone())
        assert torch.equal(lasts[0], lasts[1])
        assert torch.equal(steps[0].velocity, steps[1].velocity)
    assert not torch.equal(lasts[0], start)


def test_close_to_float64() -> None:
    start, change = torch.randn(COUNT), 1e-3 * torch.randn(COUNT)
    found, exact = start.cuda(), start.double()
    Muon(found, rate=0.03, momentum=0.9, matrices=MATRICES).move(found, change.cuda(), 0.1)
    Muon(exact, rate=0.03, momentum=0.9, matrices=MATRICES).move(exact, change.double(), 0.1)
    for place in MATRICES:
        moved, right = (place.of(found.cpu().double() - start.double()), place.of(exact - start.double()))
        assert (moved - right).norm() < 0.03 * right.norm()
