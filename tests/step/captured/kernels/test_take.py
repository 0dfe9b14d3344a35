"""Batches from samples on the device: which samples, which crops, and how they are laid out."""

import pytest
import torch
from torch.nn import functional

from deepex.step.captured.kernels.take import Taker, folded_channels
from tests.step.captured.kernels.conftest import DEVICE


def _taker(channels: int = 1, **options: object) -> Taker:
    """Twelve images of 7×5 of which no two pixels are alike, but the black ones; in an order of its own."""
    images = torch.arange(1, 1 + 12 * 7 * 5 * channels, device=DEVICE, dtype=torch.float32).view(12, 7, 5, channels)
    factor, offset = torch.full((channels,), 0.5, device=DEVICE), torch.arange(channels, device=DEVICE, dtype=torch.float32) + 3
    order = torch.tensor([5, 3, 11, 0, 1, 2, 4, 6, 7, 8, 9, 10], device=DEVICE)
    key = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    own = {"size": (7, 5)} | options
    return Taker(
        images=images, labels=torch.arange(12, device=DEVICE) * 10, order=order, key=key, factor=factor, offset=offset, **own
    )


def _take(taker: Taker, row: int = 1, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.tensor([[0, 77], [2, 2**62 + 5], [2, 9]], device=DEVICE)
    return taker.take(places, torch.tensor([row], device=DEVICE), count, torch.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_samples_at_the_cursor_scaled(channels: int) -> None:
    taker = _taker(channels)
    images, labels = _take(taker)
    assert labels.tolist() == [110, 0, 10]
    assert int(taker.key) == 2**62 + 5
    expected = taker.images[[11, 0, 1]] * 0.5 + taker.offset
    assert torch.equal(images.permute(0, 2, 3, 1), expected)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("size", "pad"), [((7, 5), 2), ((4, 4), 0), ((4, 4), 1)])
def test_crops_lie_inside_the_padded_image_and_differ(size: tuple[int, int], pad: int, flip: bool) -> None:
    taker = _taker(size=size, pad=pad, flip=flip)
    seen = set()
    for row in (1, 2):
        images, _ = _take(taker, row, count=10)
        for image, number in zip(images[:, 0], taker.order[2:].tolist(), strict=True):
            wide = functional.pad(taker.images[number, :, :, 0], (pad,) * 4) * 0.5 + 3  # black before it is scaled
            crops = {
                (top, left, mirrored): crop.flip(1) if mirrored else crop
                for top in range(wide.shape[0] - size[0] + 1)
                for left in range(wide.shape[1] - size[1] + 1)
                for crop in [wide[top : top + size[0], left : left + size[1]]]
                for mirrored in (False, True)
            }
            found = [place for place, crop in crops.items() if torch.equal(crop, image)]
            assert found, "a crop of its own sample"
            assert flip or not found[0][2]
            seen.add((row, *found[0]))
    assert len({place[1:3] for place in seen}) > 2
    assert {place[1:] for place in seen if place[0] == 1} != {place[1:] for place in seen if place[0] == 2}
    assert not flip or {place[3] for place in seen} == {False, True}


@pytest.mark.parametrize(("fold", "border", "kernel"), [(2, 3, 7), (2, 1, 3), (4, 2, 6), (2, 0, 4)])
def test_folded_images_give_the_same_convolution(fold: int, border: int, kernel: int) -> None:
    taker = _taker(3, fold=fold, border=border, kernel=kernel)
    plain, _ = _take(_taker(3))
    folded, _ = _take(taker)
    weight = torch.randn(4, 3, kernel, kernel, device=DEVICE, dtype=torch.float64)
    side = -(-kernel // fold)
    padded = functional.pad(weight, (0, side * fold - kernel) * 2)
    squares = padded.reshape(4, 3, side, fold, side, fold).permute(0, 3, 5, 1, 2, 4).reshape(4, 3 * fold * fold, side, side)
    arranged = functional.pad(squares, (0, 0, 0, 0, 0, folded_channels(fold, 3) - 3 * fold * fold))
    expected = functional.conv2d(plain.double(), weight, stride=fold, padding=border)
    torch.testing.assert_close(functional.conv2d(folded.double(), arranged), expected)
