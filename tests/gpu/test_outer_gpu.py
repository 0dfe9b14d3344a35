"""The outer step on a GPU, in bf16 for the most part and replayed from the second on, is close to float64's."""

import pytest
import torch

from deepex.sync.outer.muon import Muon
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice

pytestmark = pytest.mark.gpu
MATRICES = (MatrixSlot(0, 64, 576), MatrixSlot(40_000, 256, 64), MatrixSlot(60_000, 64, 256), MatrixSlot(80_000, 27, 512))
COUNT = 100_000


def test_close_to_float64() -> None:
    start, drawn = torch.randn(COUNT), [1e-3 * torch.randn(COUNT) for _ in range(3)]
    found, exact = start.cuda(), start.double()
    for weights in (found, exact):
        every = slice(0, COUNT)
        synced = SyncedSlice(agreed=weights, buffers=slice(0, 0), weights=every, own=every, request=0, matrices=MATRICES)
        step = Muon(synced, rate=0.03, momentum=0.9, peak=0.1)
        step.start(weights)
        change = torch.empty_like(weights)
        for number, each in enumerate(drawn, 1):
            step.move(weights, change.copy_(each), 0.1 / number)
    for place in MATRICES:
        moved, right = (place.of(found.cpu().double() - start.double()), place.of(exact - start.double()))
        assert (moved - right).norm() < 0.03 * right.norm()
    others = torch.ones(COUNT, dtype=torch.bool)
    for place in MATRICES:
        place.of(others).fill_(False)
    torch.testing.assert_close(found.cpu()[others], exact.float()[others])
