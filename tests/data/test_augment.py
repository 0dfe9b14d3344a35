"""Random crops and flips: every image is a real crop of its original, drawn from the step's random numbers alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.data.augment import Augment, AugmentConfig
from deepex.errors import ConfigError
from tests.full import examples


def crops(image: np.ndarray, config: AugmentConfig, size: tuple[int, int]) -> set[bytes]:
    """All that could become of an image, by plain slicing."""
    padded = np.pad(image, ((config.pad, config.pad), (config.pad, config.pad), (0, 0)))
    height, width = size
    if size == image.shape[:2] and not config.pad:
        places = [(0, 0)]
    else:
        places = [(y, x) for y in range(padded.shape[0] - height + 1) for x in range(padded.shape[1] - width + 1)]
    found = {padded[y : y + height, x : x + width].tobytes() for y, x in places}
    flipped = {padded[y : y + height, x : x + width][:, ::-1].tobytes() for y, x in places}
    return found | flipped if config.flip else found


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.data())
def test_each_image_becomes_one_of_its_crops(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(2, 7)), data.draw(st.integers(2, 7))
    config = AugmentConfig(
        crop=data.draw(st.integers(0, min(height, width))),
        pad=data.draw(st.integers(0, min(height, width, 3) - 1)),
        flip=data.draw(st.booleans()),
    )
    channels, seed = data.draw(st.sampled_from([1, 3])), data.draw(st.integers(0, 1000))
    raw = torch.from_numpy(np.random.default_rng(seed).integers(1, 256, (5, height, width, channels), np.uint8))
    augment = Augment(config, (height, width))
    before = raw.clone()
    torch.manual_seed(seed)
    first = augment(raw)
    torch.manual_seed(seed)
    assert torch.equal(first, augment(raw))
    assert torch.equal(raw, before)
    assert first.shape == (5, *augment.size, channels)
    assert first.dtype == torch.uint8
    for image, made in zip(raw.numpy(), first.numpy(), strict=True):
        assert made.tobytes() in crops(image, config, augment.size)
    top, left = (height - augment.size[0]) // 2, (width - augment.size[1]) // 2
    assert torch.equal(augment.middle(raw), raw[:, top : top + augment.size[0], left : left + augment.size[1]])


def test_images_of_one_batch_are_cropped_and_flipped_each_in_its_own_way() -> None:
    raw = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8, 1).expand(200, 8, 8, 1)
    torch.manual_seed(1)
    made = Augment(AugmentConfig(crop=5, flip=True), (8, 8))(raw)
    assert len({image.numpy().tobytes() for image in made}) > 25  # of 32: 16 places, mirrored or not


@pytest.mark.parametrize("config", [AugmentConfig(pad=2, flip=True), AugmentConfig(crop=3, pad=1), AugmentConfig(crop=4)])
def test_every_place_is_drawn(config: AugmentConfig) -> None:
    """Over each edge of a padded image, too: of 50 crops at most, none is left out 2,000 times."""
    image = np.arange(1, 31, dtype=np.uint8).reshape(5, 6, 1)
    augment = Augment(config, (5, 6))
    torch.manual_seed(1)
    made = augment(torch.from_numpy(image).expand(2000, 5, 6, 1))
    assert {one.numpy().tobytes() for one in made} == crops(image, config, augment.size)


def test_a_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="crop at most 28"):
        AugmentConfig(crop=32).size(28, 40)
    with pytest.raises(ConfigError, match=r"augment\.pad is 28, but the images are 28×40, .*: pad by less than 28"):
        AugmentConfig(pad=28).size(28, 40)
    with pytest.raises(ConfigError, match=r"augment\.pad is -1"):
        AugmentConfig(pad=-1)
