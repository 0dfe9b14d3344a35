"""Resize and crop against Pillow's own resize followed by a plain crop."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from deepex.data.geometry import Geometry, parse_size, text
from deepex.errors import DataError
from tests.full import examples

sides = st.integers(1, 90)
resizes = st.none() | st.integers(1, 70) | st.tuples(st.integers(1, 70), st.integers(1, 70))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, Geometry]:
    """An image size and a geometry whose crop fits it."""
    height, width, resize = draw(sides), draw(sides), draw(resizes)
    between = Geometry(resize=resize).resized(height, width)
    if between[0] * between[1] > 400_000:
        resize, between = None, (height, width)
    crop = draw(st.none() | st.tuples(*(st.integers(1, side) for side in between)))
    return height, width, Geometry(resize=resize, crop=crop)


def by_pillow(plane: NDArray[np.generic], geometry: Geometry) -> NDArray[np.float64]:
    """One channel, resized as a whole and cropped then."""
    resized = geometry.resized(*plane.shape)
    made = np.asarray(Image.fromarray(plane).resize(resized[::-1], Image.Resampling.BILINEAR), np.float64)
    height, width = geometry.crop or resized
    top, left = (resized[0] - height) // 2, (resized[1] - width) // 2
    return made[top : top + height, left : left + width]


@given(cases(), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(37, 150), deadline=None)
@example((10, 48, Geometry(resize=(53, 52))), 3, 52)  # of a pixel that is exactly 82 we make 81, and Pillow 83
@example((4, 2, Geometry(resize=1)), 1, 0)  # becomes one pixel wide
def test_bytes_are_exact_to_one_level(case: tuple[int, int, Geometry], channels: int, seed: int) -> None:
    height, width, geometry = case
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)
    made = geometry.apply(image)
    assert made.dtype == np.uint8
    assert made.shape == (*geometry.size(height, width), channels)
    for channel in range(channels):
        exact = by_pillow(image[..., channel].astype(np.float32), geometry)
        # A half for each rounding; in each of two passes weights of 15 bits, of which those of most weight are two.
        assert np.abs(made[..., channel] - exact).max() <= 1 + 2 * 2 * 255 / 2**15
        assert np.abs(made[..., channel] - by_pillow(image[..., channel], geometry)).max() <= 2


@given(cases(), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(25, 100), deadline=None)
def test_floats_are_those_of_pillow_to_rounding(case: tuple[int, int, Geometry], channels: int, seed: int) -> None:
    height, width, geometry = case
    image = np.random.default_rng(seed).normal(0, 1000, (height, width, channels)).astype(np.float32)
    made = geometry.apply(image)
    assert made.dtype == np.float32
    assert made.shape == (*geometry.size(height, width), channels)
    for channel in range(channels):
        np.testing.assert_allclose(made[..., channel], by_pillow(image[..., channel], geometry), rtol=0, atol=0.05)


@given(st.integers(64, 200), st.integers(64, 200), st.integers(1, 30), st.sampled_from([np.uint8, np.float32]))
@settings(max_examples=examples(15, 60), deadline=None)
def test_an_image_decoded_at_a_smaller_scale_shows_the_same(height: int, width: int, side: int, dtype: type[np.generic]) -> None:
    """Means of 2×2 pixels, the last ones of those that are there: half the size, rounded up."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([x, y, 255 - x], axis=-1).clip(0, 255).astype(dtype)
    padded = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), "edge").astype(np.float64)
    halved = padded.reshape(len(padded) // 2, 2, -1, 2, 3).mean(axis=(1, 3)).astype(dtype)
    geometry = Geometry(resize=side)
    made = geometry.apply(halved, original=(height, width), scale=0.5)
    assert made.shape == (*geometry.size(height, width), 3)
    assert np.abs(made.astype(np.float64) - geometry.apply(image)).max() <= 3


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 500))
def test_the_shorter_side_is_exact_and_the_longer_in_proportion(height: int, width: int, side: int) -> None:
    made = Geometry(resize=side).size(height, width)
    assert min(made) == side
    assert max(made) == side * max(height, width) // min(height, width)


def test_no_geometry_changes_nothing() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert Geometry().apply(image) is not None
    np.testing.assert_array_equal(Geometry().apply(image), image)
    np.testing.assert_array_equal(Geometry(resize=2).apply(image), image)
    np.testing.assert_array_equal(Geometry(crop=(1, 3)).apply(image), image[:1, :3])


@given(st.integers(1, 9999) | st.tuples(st.integers(1, 9999), st.integers(1, 9999)))
def test_a_size_goes_to_text_and_back(size: int | tuple[int, int]) -> None:
    assert parse_size(text(size)) == size


@pytest.mark.parametrize("value", ["", "x", "0", "-3", "224x", "x224", "1x2x3", "22 4", "1e3", "0x10", "224x0", "1" * 30])
def test_a_size_that_is_none_is_named(value: str) -> None:
    with pytest.raises(DataError, match=r"give for example 256 or 224x192"):
        parse_size(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": 0}, "resize is"),
        ({"resize": True}, "resize is"),
        ({"resize": (10, -1)}, "resize is"),
        ({"resize": (1, 2, 3)}, "give one or two numbers"),
        ({"resize": 10**6}, "from 1 to 65536"),
        ({"crop": (0, 5)}, "crop is"),
        ({"crop": (5,)}, "give two numbers"),
        ({"resize": 100, "crop": (101, 101)}, "crop 101x101 is larger than resize 100"),
        ({"resize": (100, 50), "crop": (100, 51)}, "crop 100x51 is larger than resize 100x50"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Geometry(**options)  # type: ignore[arg-type]


def test_a_crop_larger_than_the_image_is_named() -> None:
    with pytest.raises(DataError, match=r"crop 40x20 is larger than the image \(30x60; height × width\)"):
        Geometry(crop=(40, 20)).size(30, 60)
    with pytest.raises(DataError, match=r"30x60, 20x40 after the resize"):
        Geometry(resize=20, crop=(10, 41)).size(30, 60)
