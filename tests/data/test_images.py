"""PNG files made by hand (zlib and struct) and JPEG files written by Pillow, read back; damaged ones named; folders and lists."""

import csv
import io
import os
import pickle
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from deepex.data.geometry import Geometry
from deepex.data.source import open_source
from deepex.data.source.base import UnreadableError
from deepex.data.source.decode import REPLICATED, SampleSize, decode
from deepex.data.source.folder import Listing, find_images, read_list
from deepex.data.source.image import ImageFiles
from deepex.data.source.part import part_folders
from deepex.errors import DataError
from tests.full import examples

U8, F4 = np.dtype(np.uint8), np.dtype(np.float32)
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def packed_rows(values: NDArray[Any], depth: int, rng: np.random.Generator) -> bytes:
    """The rows of (height, width, values), each behind a filter of its own: none, sub or up."""
    height, _, per_pixel = values.shape
    if depth == 16:
        rows = values.astype(">u2").view(np.uint8).reshape(height, -1)
    elif depth == 8:
        rows = values.astype(np.uint8).reshape(height, -1)
    else:
        bits = np.unpackbits(values.astype(np.uint8)[..., np.newaxis], axis=-1)[..., 8 - depth :]
        rows = np.packbits(bits.reshape(height, -1), axis=-1)
    step = max(1, depth * per_pixel // 8)
    made, above = b"", np.zeros_like(rows[0])
    for row in rows:
        kind = int(rng.integers(3))
        other = (np.zeros_like(row), np.concatenate([np.zeros(step, np.uint8), row])[: len(row)], above)[kind]
        made += bytes([kind]) + (row - other).tobytes()
        above = row
    return made


def png(values: NDArray[Any], depth: int = 8, *, palette: bytes = b"", extra: bytes = b"", interlace: bool = False) -> bytes:
    """A PNG file of these values; `extra` are whole chunks that stand before the pixels."""
    height, width, per_pixel = values.shape
    rng = np.random.default_rng(int(values.sum()))
    parts = [values[y::dy, x::dx] for y, x, dy, dx in ADAM7] if interlace else [values]
    raw = b"".join(packed_rows(part, depth, rng) for part in parts if part.size)
    header = struct.pack(">IIBBBBB", width, height, depth, 3 if palette else COLOUR_TYPES[per_pixel], 0, 0, int(interlace))
    stream = zlib.compress(raw)
    middle = len(stream) // 2
    tables = chunk(b"PLTE", palette) if palette else b""
    pixels = chunk(b"IDAT", stream[:middle]) + chunk(b"IDAT", stream[middle:])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + tables + extra + pixels + chunk(b"IEND")


def jpeg(values: NDArray[np.uint8], **options: Any) -> bytes:
    mode = {1: "L", 3: "RGB", 4: "CMYK"}[values.shape[2]]
    file = io.BytesIO()
    Image.frombytes(mode, values.shape[1::-1], values.tobytes()).save(file, "JPEG", **{"quality": 95, **options})
    return file.getvalue()


def smooth(height: int, width: int, channels: int) -> NDArray[np.uint8]:
    y, x, c = np.ogrid[:height, :width, :channels]
    return (128 + 100 * np.sin(y / 17 + c) * np.cos(x / 23 - c)).astype(np.uint8)


def noise(height: int, width: int, values: int, most: int = 255) -> NDArray[Any]:
    return np.random.default_rng(height * width).integers(0, most + 1, (height, width, values))


def target(channels: int = 3, dtype: np.dtype[Any] = U8, **options: Any) -> SampleSize:
    return SampleSize(**{"size": None, "channels": channels, "dtype": dtype, "geometry": Geometry(), **options})


def read(data: bytes, *arguments: Any, **options: Any) -> tuple[NDArray[Any], Counter[str]]:
    notes: Counter[str] = Counter()
    return decode(data, target(*arguments, **options), notes), notes


def reason(data: bytes, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UnreadableError) as caught:
        read(data, *arguments, **options)
    return str(caught.value)


# Pixels


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (3, 8)]),
    st.booleans(),
    st.sampled_from([U8, F4]),
)
@settings(max_examples=examples(37, 150), deadline=None)
def test_png_pixels_are_exact(height: int, width: int, kind: tuple[int, int], interlace: bool, dtype: np.dtype[Any]) -> None:
    channels, depth = kind
    values = noise(height, width, channels, (1 << depth) - 1)
    if depth == 16 and dtype == U8:
        assert "--dtype float32" in reason(png(values, depth, interlace=interlace), 1, dtype)
        return
    made, notes = read(png(values, depth, interlace=interlace), channels, dtype)
    assert made.dtype == dtype
    assert notes == Counter()
    np.testing.assert_array_equal(made, values * (255 // ((1 << depth) - 1) if depth < 8 else 1))


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.integers(1, 256))
@settings(max_examples=examples(15, 60), deadline=None)
def test_a_palette_is_expanded_exactly(height: int, width: int, depth: int, colours: int) -> None:
    colours = min(colours, 1 << depth)
    table = noise(colours, 1, 3)[:, 0].astype(np.uint8)
    table[0] = (1, 2, 3)  # in colour
    values = noise(height, width, 1, colours - 1)
    made, _ = read(png(values, depth, palette=table.tobytes()))
    np.testing.assert_array_equal(made, table[values[..., 0]])


def test_a_palette_of_greys_is_monochrome() -> None:
    values = noise(5, 6, 1, 3)
    made, notes = read(png(values, 2, palette=bytes([9, 9, 9, 20, 20, 20, 30, 30, 30, 255, 255, 255])), 1)
    np.testing.assert_array_equal(made[..., 0], np.array([9, 20, 30, 255])[values[..., 0]])
    assert not notes


def test_a_pixel_beyond_the_palette_is_bad() -> None:
    assert "2 colours in its palette" in reason(png(np.full((2, 2, 1), 3), 8, palette=b"\1\2\3\4\5\6"))


@pytest.mark.parametrize("data", [png(noise(7, 9, 1)), jpeg(smooth(7, 9, 1))], ids=["png", "jpeg"])
def test_monochrome_is_replicated_and_counted(data: bytes) -> None:
    made, notes = read(data, 3)
    grey, none = read(data, 1)
    np.testing.assert_array_equal(made, np.repeat(grey, 3, axis=-1))
    assert notes == Counter({REPLICATED: 1})
    assert not none


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": "4:1:1"}])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_pixels_are_those_of_pillow(channels: int, options: dict[str, Any]) -> None:
    data = jpeg(smooth(50, 70, channels), **options)
    made, _ = read(data, channels)
    with Image.open(io.BytesIO(data)) as image:
        theirs = np.asarray(image).reshape(50, 70, channels)
    assert np.abs(made.astype(int) - theirs).max() <= 1


@given(st.integers(20, 300), st.integers(20, 300), st.integers(8, 64))
@settings(max_examples=examples(10, 40), deadline=None)
def test_a_jpeg_decoded_at_a_smaller_scale_shows_the_same(height: int, width: int, side: int) -> None:
    values = smooth(height, width, 3)
    geometry = Geometry(resize=side, crop=(min(side, 8), min(side, 8)))
    made, _ = read(jpeg(values), geometry=geometry)
    assert made.shape == (*geometry.size(height, width), 3)
    assert np.abs(made.astype(int) - geometry.apply(values)).max() < 12


def test_the_kind_is_told_by_the_bytes_and_not_by_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.JPEG").write_bytes(png(noise(4, 5, 3)))
    images = ImageFiles(find_images(tmp_path)[0], geometry=Geometry())
    out = np.empty((1, *images.shape), images.dtype)
    assert images.read(np.array([0]), out) == []
    np.testing.assert_array_equal(out[0], noise(4, 5, 3))


def test_the_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    made, _ = read(jpeg(smooth(30, 50, 3), exif=exif))
    assert made.shape == (30, 50, 3)


# What needs --convert


def with_alpha(values: int, alpha: int) -> bytes:
    pixels = noise(6, 7, values)
    pixels[..., -1] = 255
    pixels[0, 0, -1] = alpha
    return png(pixels)


@pytest.mark.parametrize("values", [2, 4])
def test_opaque_alpha_is_left_out_and_any_other_refused(values: int) -> None:
    made, notes = read(with_alpha(values, 255), values - 1)
    np.testing.assert_array_equal(made, noise(6, 7, values)[..., :-1])
    assert not notes
    assert "not fully opaque" in reason(with_alpha(values, 254), values - 1)
    made, notes = read(with_alpha(values, 51), values - 1, convert=True)
    np.testing.assert_array_equal(made[0, 0], np.round(noise(6, 7, values)[0, 0, :-1] / 5))
    np.testing.assert_array_equal(made[1:], noise(6, 7, values)[1:, :, :-1])
    assert list(notes) == ["alpha, laid over black"]


@pytest.mark.parametrize(
    ("values", "depth", "palette", "transparency"),
    [
        (noise(4, 4, 1, 3), 2, b"", b"\0\2"),
        (noise(4, 4, 1, 65535), 16, b"", noise(4, 4, 1, 65535)[1, 1].astype(">u2").tobytes()),
        (noise(4, 4, 3), 8, b"", noise(4, 4, 3)[2, 2].astype(">u2").tobytes()),
        (noise(4, 4, 1, 3), 2, bytes(range(12)), b"\xff\xff\0"),
    ],
)
def test_a_transparent_colour_is_alpha(values: NDArray[Any], depth: int, palette: bytes, transparency: bytes) -> None:
    data = png(values, depth, palette=palette, extra=chunk(b"tRNS", transparency))
    channels = 3 if palette else values.shape[2]
    dtype = F4 if depth == 16 else U8
    assert "not fully opaque" in reason(data, channels, dtype)
    made, notes = read(data, channels, dtype, convert=True)
    plain, _ = read(png(values, depth, palette=palette), channels, dtype)
    clear = (values == 2).all(axis=-1) if depth == 2 else (values == np.frombuffer(transparency, ">u2")).all(axis=-1)
    assert clear.any()
    np.testing.assert_array_equal(made, np.where(clear[..., np.newaxis], 0, plain))
    assert list(notes) == ["alpha, laid over black"]


@pytest.mark.parametrize(("values", "size"), [(1, 3), (1, 4), (3, 5), (3, 7)])
def test_a_transparent_colour_of_another_length_is_named(values: int, size: int) -> None:
    assert "tRNS" in reason(png(noise(4, 4, values), 8, extra=chunk(b"tRNS", bytes(size))), values)


@pytest.mark.parametrize("values", [1, 2, 3, 4])
def test_sixteen_bits_are_reduced_only_if_asked(values: int) -> None:
    pixels = noise(5, 5, values, 65535)
    if values in (2, 4):
        pixels[..., -1] = 65535
    channels = 1 if values < 3 else 3
    assert "16 bits" in reason(png(pixels, 16), channels)
    if values > 1:
        assert "only plain grey" in reason(png(pixels, 16), channels, F4)
    made, notes = read(png(pixels, 16), channels, convert=True)
    np.testing.assert_array_equal(made, pixels[..., :channels] >> 8)
    assert list(notes) == ["16 bits, reduced to the high byte"]


def test_cmyk_is_converted_only_if_asked() -> None:
    values = smooth(40, 40, 4)
    data = jpeg(values, quality=100, subsampling=0)
    assert "it is CMYK" in reason(data)
    made, notes = read(data, convert=True)
    theirs = np.asarray(Image.frombytes("CMYK", (40, 40), values.tobytes()).convert("RGB"))
    assert np.abs(made.astype(int) - theirs).max() <= 6
    assert list(notes) == ["CMYK, converted to RGB"]


@pytest.mark.parametrize("data", [png(smooth(30, 30, 3)), jpeg(smooth(30, 30, 3), quality=100, subsampling=0)], ids=["png", "jpeg"])
def test_colour_for_one_channel_is_refused_or_converted(data: bytes) -> None:
    assert "--channels 3" in reason(data, 1)
    made, notes = read(data, 1, convert=True)
    theirs = np.asarray(Image.frombytes("RGB", (30, 30), smooth(30, 30, 3).tobytes()).convert("L"))
    assert np.abs(made[..., 0].astype(int) - theirs).max() <= 2
    assert list(notes) == ["colour, converted to monochrome"]


def test_an_animated_png_is_refused_or_its_first_image_taken() -> None:
    file = io.BytesIO()
    frames = [Image.fromarray(smooth(9, 9, 3)), Image.fromarray(255 - smooth(9, 9, 3))]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    assert "animated" in reason(file.getvalue())
    made, notes = read(file.getvalue(), convert=True)
    np.testing.assert_array_equal(made, smooth(9, 9, 3))
    assert list(notes) == ["animated, first image taken"]


# What is damaged


def gif() -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth(9, 9, 1)[..., 0]).save(file, "GIF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x89PNG", "0x89504e47"),
        (b"hello, world", "neither PNG nor JPEG"),
        (gif(), "GIF"),
        (b"\xff\xd8\xff", "header"),
        (png(noise(4, 4, 3))[:-1], "truncated"),
        (png(noise(4, 4, 3))[:33], "truncated"),
        (png(noise(4, 4, 1)).replace(b"IDAT", b"JDAT"), "checksum"),
        (png(noise(4, 4, 1), extra=chunk(b"ABCD")), "no PNG of pixels"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IEND"), "not where"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)) + chunk(b"IEND"), "damaged"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 5, 2, 0, 0, 0)) + chunk(b"IEND"), "no PNG may"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 4, 8, 2, 0, 0, 0)) + chunk(b"IEND"), "no PNG may"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 3, 0, 0, 0)) + chunk(b"IEND"), "palette"),
    ],
)
def test_what_is_no_image_has_a_reason(data: bytes, message: str) -> None:
    assert message in reason(data)


def bomb(height: int, width: int, size: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(size))) + chunk(b"IEND")


def test_bombs_are_refused_before_they_are_decoded() -> None:
    assert "89478485" in reason(bomb(10_000, 9_000, 90_009_000))
    assert "cannot hold" in reason(bomb(60_000, 60_000, 100))
    assert "cannot hold" in reason(bomb(9_000, 9_000, 100))
    assert "limit of 99" in reason(png(noise(10, 10, 1)), max_pixels=99)
    assert "limit of 99" in reason(jpeg(smooth(10, 10, 3)), max_pixels=99)
    read(png(noise(10, 10, 1)), max_pixels=100)
    read(jpeg(smooth(10, 10, 3)), max_pixels=100)
    assert "the resize makes" in reason(bomb(1, 50_000, 50_000), geometry=Geometry(resize=256))
    large = bytearray(jpeg(smooth(16, 16, 3)))
    frame = large.index(b"\xff\xc0")
    large[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    assert "89478485" in reason(bytes(large))


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    data = jpeg(smooth(16, 16, 3), progressive=True)
    last = data.rindex(b"\xff\xda")
    assert "decompression bomb" in reason(data[:-2] + 600 * data[last:-2] + data[-2:])


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_every_truncation_of_a_jpeg_is_named(options: dict[str, Any]) -> None:
    data = jpeg(smooth(24, 40, 3), **options)
    read(data)
    for size in range(len(data)):
        assert reason(data[:size])


@pytest.mark.parametrize("data", [png(noise(3, 4, 3)), png(noise(4, 4, 1, 3), 2, palette=bytes(range(12)))])
def test_every_changed_byte_of_a_png_is_named(data: bytes) -> None:
    read(data)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        assert reason(bytes(changed))


SEEDS = {
    "grey": png(noise(6, 5, 1)),
    "colour": png(noise(6, 5, 3)),
    "bits": png(noise(6, 5, 1, 1), 1, interlace=True),
    "palette": png(noise(6, 5, 1, 3), 4, palette=bytes(range(12)), extra=chunk(b"tRNS", b"\0")),
    "deep": png(noise(6, 5, 1, 65535), 16),
    "deep colour": png(noise(6, 5, 4, 65535), 16, interlace=True),
    "alpha": with_alpha(4, 7),
    "jpeg": jpeg(smooth(33, 40, 3)),
    "jpeg grey": jpeg(smooth(33, 40, 1)),
    "jpeg progressive": jpeg(smooth(33, 40, 3), progressive=True),
    "jpeg restarts": jpeg(smooth(33, 40, 3), restart_marker_blocks=2),
    "jpeg CMYK": jpeg(smooth(33, 40, 4)),
}


def mended(data: bytes) -> bytes:
    """The same PNG with right checksums, so that damage reaches the decoder."""
    made, start = data[:8], 8
    while start + 12 <= len(data):
        stop = start + 8 + int.from_bytes(data[start : start + 4])
        made += data[start:stop] + struct.pack(">I", zlib.crc32(data[start + 4 : stop]))
        start = stop + 4
    return made


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(SEEDS[draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "remove", "set"]))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and data:
            data[place] = draw(st.sampled_from([0, 1, 127, 128, 255]))
        elif kind == "cut":
            del data[place:]
        elif kind == "remove":
            del data[place : place + draw(st.integers(1, 20))]
        else:
            data[place:place] = draw(st.binary(min_size=1, max_size=20))
    return mended(bytes(data)) if draw(st.booleans()) else bytes(data)


@given(
    damaged(),
    st.sampled_from([1, 3]),
    st.sampled_from([U8, F4]),
    st.booleans(),
    st.sampled_from([Geometry(), Geometry(resize=9), Geometry(resize=(8, 8), crop=(5, 8))]),
)
@settings(max_examples=examples(150, 1500), deadline=None)
def test_a_damaged_file_gives_a_reason_or_a_whole_array(
    data: bytes, channels: int, dtype: np.dtype[Any], convert: bool, geometry: Geometry
) -> None:
    try:
        made, _ = read(data, channels, dtype, convert=convert, geometry=geometry, max_pixels=100_000)
    except UnreadableError:
        return
    assert made.ndim == 3
    assert made.shape[2] == channels
    assert made.dtype == dtype
    if geometry.crop is not None:
        assert made.shape[:2] == geometry.crop


# Files as samples


def write_classes(root: Path, **counts: int) -> None:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(png(np.full((4, 5, 3), number)))


def read_all(images: ImageFiles) -> tuple[NDArray[Any], list[Any]]:
    out = np.empty((images.count, *images.shape), images.dtype)
    return out, images.read(np.arange(images.count), out)


def test_reading_goes_by_number_and_survives_pickling(tmp_path: Path) -> None:
    write_classes(tmp_path, a=3, b=4)
    images = pickle.loads(pickle.dumps(ImageFiles(find_images(tmp_path)[0], geometry=Geometry())))
    assert (images.count, images.shape, images.dtype) == (7, (4, 5, 3), U8)
    out = np.empty((3, 4, 5, 3), np.uint8)
    assert images.read(np.array([1, 3, 6]), out) == []
    assert out[:, 0, 0, 0].tolist() == [1, 0, 3]
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert images.name(6) == "b/3.png"


def test_what_is_not_given_is_taken_from_the_first_readable_file(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"")
    (tmp_path / "1.png").write_bytes(png(noise(6, 8, 1, 65535), 16))
    images = ImageFiles(find_images(tmp_path)[0], geometry=Geometry(resize=3))
    assert (images.shape, images.dtype) == ((3, 4, 1), F4)
    assert images.description["decided"] == "channels, dtype, size from 1.png"
    given_all = ImageFiles(find_images(tmp_path)[0], geometry=Geometry(crop=(2, 2)), channels=3, dtype=U8)
    assert (given_all.shape, given_all.dtype) == ((2, 2, 3), U8)
    assert given_all.description["decided"] is None


def test_most_of_the_first_files_decide_and_not_the_very_first(tmp_path: Path) -> None:
    for number in range(20):
        odd = {0: noise(8, 6, 1, 65535), 2: noise(8, 6, 3), 3: noise(5, 5, 1)}.get(number)
        (tmp_path / f"{number:02}.png").write_bytes(png(noise(6, 8, 3) if odd is None else odd, 16 if number == 0 else 8))
    (tmp_path / "01.png").write_bytes(b"")
    images = ImageFiles(find_images(tmp_path)[0], geometry=Geometry())
    assert (images.shape, images.dtype) == ((6, 8, 3), U8)
    assert images.description["decided"] == "channels, dtype, size from most of 16 files, from 00.png on"
    assert [entry.place for entry in read_all(images)[1]] == [0, 1, 2, 3]


def grey(path: Path, value: int, bits: int) -> None:
    kind, most = {8: (np.uint8, 255), 16: (np.uint16, 65535)}[bits]
    Image.fromarray(np.full((4, 5), min(value, most), kind)).save(path, **({"quality": 100} if path.suffix == ".jpg" else {}))


@pytest.mark.parametrize("deep_files", [1, 3])
@pytest.mark.parametrize("dtype", [None, F4])
def test_pictures_of_8_and_of_16_bits_do_not_mix_unseen(tmp_path: Path, deep_files: int, dtype: np.dtype[Any] | None) -> None:
    grey(tmp_path / "0.png", 514, 16)
    grey(tmp_path / "1.jpg", 2, 8)
    grey(tmp_path / "2.png", 3, 8)
    for number in range(3, 6):
        grey(tmp_path / f"{number}.png", 1028, 16 if deep_files == 3 else 8)
    listing = find_images(tmp_path)[0]
    images = ImageFiles(listing, geometry=Geometry(), dtype=dtype)
    is_deep = deep_files == 3
    assert images.description["bits"] == (16 if is_deep else 8)
    bad = {entry.place: entry.reason for entry in read_all(images)[1]}
    assert sorted(bad) == ([1, 2] if is_deep else [0])
    assert all("--convert" in reason for reason in bad.values())
    assert ("it has 8 bits per value, and the dataset's images have 16" if is_deep else "16 bits per value, which") in min(
        bad.values()
    )
    images = ImageFiles(listing, geometry=Geometry(), dtype=dtype, convert=True)
    out, found = read_all(images)
    assert found == []
    assert out[:, 0, 0, 0].tolist() == ([514, 514, 771, 1028, 1028, 1028] if is_deep else [2, 2, 3, 255, 255, 255])
    assert images.notes == Counter({"8 bits, times 257 for 16": 2} if is_deep else {"16 bits, reduced to the high byte": 1})


def test_what_train_images_decide_holds_for_validation_images(tmp_path: Path) -> None:
    for name, size in (("train/0", (6, 8)), ("train/1", (6, 8)), ("val/0", (8, 6)), ("val/1", (6, 8))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(png(noise(*size, 3)))
    source = open_source(tmp_path)
    assert source.validation is not None
    assert source.validation.shape == (6, 8, 3)


def test_each_bad_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(noise(6, 8, 3)))
    (tmp_path / "1.png").mkdir()
    os.mkfifo(tmp_path / "2.png")
    (tmp_path / "3.png").symlink_to(tmp_path / "3.png")
    (tmp_path / "4.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "5.png").write_bytes(png(noise(8, 6, 3)))
    (tmp_path / "6.png").write_bytes(png(noise(6, 8, 1)))
    images = ImageFiles(find_images(tmp_path)[0], geometry=Geometry())
    out, bad = read_all(images)
    assert [(entry.place, entry.name) for entry in bad] == [(n, f"{n}.png") for n in range(1, 6)]
    reasons = [entry.reason for entry in bad]
    for found, words in zip(reasons, ["a folder", "a pipe", "cannot be read", "No such file", "it is 8x6"], strict=True):
        assert words in found
    assert "--resize 6x8" in reasons[-1]
    np.testing.assert_array_equal(out[6], np.repeat(noise(6, 8, 1), 3, axis=-1))
    assert images.notes == Counter({REPLICATED: 1})


def test_a_resize_brings_all_to_one_size(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(noise(6, 8, 3)))
    (tmp_path / "1.jpg").write_bytes(jpeg(smooth(80, 60, 3)))
    geometry = Geometry(resize=(5, 4))
    out, bad = read_all(ImageFiles(find_images(tmp_path)[0], geometry=geometry))
    assert bad == []
    np.testing.assert_array_equal(out[0], geometry.apply(noise(6, 8, 3).astype(np.uint8)))


@pytest.mark.parametrize("options", [{"channels": 2}, {"dtype": np.dtype(np.int16)}, {"max_pixels": 0}])
def test_an_option_that_cannot_be_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    write_classes(tmp_path, a=1)
    with pytest.raises(DataError, match=f"{next(iter(options))} is"):
        ImageFiles(find_images(tmp_path)[0], geometry=Geometry(), **options)


def test_a_folder_of_nothing_readable_says_why(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.png: it is empty .* give --channels, --dtype and --resize HEIGHTxWIDTH"):
        ImageFiles(find_images(tmp_path)[0], geometry=Geometry())
    for dtype in (U8, F4):
        assert (
            len(read_all(ImageFiles(find_images(tmp_path)[0], geometry=Geometry(resize=(4, 5)), channels=1, dtype=dtype))[1]) == 1
        )


# Folders


def listed(listing: Listing) -> list[str]:
    return [listing.names[number] for number in range(len(listing.names))]


def test_one_folder_per_class(tmp_path: Path) -> None:
    write_classes(tmp_path, b=2, a=1, B=1)
    (tmp_path / "a" / "inner").mkdir()
    for name in ("x.JPEG", "y.Jpe", "Thumbs.db", "notes.txt", ".hidden.png", "README"):
        (tmp_path / "a" / "inner" / name).touch()
    listing, validation = find_images(tmp_path)
    assert validation is None
    assert listing.classes == ("B", "a", "b")
    assert listed(listing) == ["B/0.png", "a/0.png", "a/inner/x.JPEG", "a/inner/y.Jpe", "b/0.png", "b/1.png"]
    assert listing.labels is not None
    assert listing.labels.tolist() == [0, 1, 1, 1, 2, 2]
    assert listing.ignored == Counter({".db": 1, ".txt": 1, "hidden": 1, "no suffix": 1})


def test_train_and_validation_have_the_same_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", a=2, b=1)
    write_classes(tmp_path / "val", a=1, b=1)
    (tmp_path / "test").mkdir()
    train, validation = find_images(tmp_path)
    assert validation is not None
    assert listed(train) == ["train/a/0.png", "train/a/1.png", "train/b/0.png"]
    assert listed(validation) == ["val/a/0.png", "val/b/0.png"]
    assert train.classes == validation.classes == ("a", "b")
    assert train.ignored == Counter({"folder test": 1})
    write_classes(tmp_path / "val", c=1)
    with pytest.raises(DataError, match="class c has a folder for validation but none for train"):
        find_images(tmp_path)


@pytest.mark.parametrize("held", ["validation", "val", "valid", "test"])
def test_every_name_of_a_validation_folder_is_known(tmp_path: Path, held: str) -> None:
    for part in ("train", held):
        write_classes(tmp_path / "classes" / part, a=2, b=1)
        write_classes(tmp_path / "flat", **{part: 2})
    train, validation = find_images(tmp_path / "classes")
    assert validation is not None
    assert train.classes == validation.classes == ("a", "b")
    train, validation = find_images(tmp_path / "flat")
    assert validation is not None
    assert (train.classes, listed(validation)) == (None, [f"{held}/0.png", f"{held}/1.png"])


@pytest.mark.parametrize(("part", "held"), [("Train", "Val"), ("TRAIN", "test"), ("train", "Validation")])
def test_the_parts_may_be_named_in_capitals(tmp_path: Path, part: str, held: str) -> None:
    write_classes(tmp_path / part, a=2, b=1)
    assert listed(find_images(tmp_path)[0]) == [f"{part}/a/0.png", f"{part}/a/1.png", f"{part}/b/0.png"]
    write_classes(tmp_path / held, a=1, b=1)
    train, validation = find_images(tmp_path)
    assert validation is not None
    assert (train.classes, listed(validation)) == (("a", "b"), [f"{held}/a/0.png", f"{held}/b/0.png"])
    assert part_folders(["TRAIN", "Train", "train", "Val", "val"], tmp_path) == ("train", "val")


def test_train_alone_is_the_source_and_validation_alone_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", a=2, b=1)
    train, validation = find_images(tmp_path)
    assert (train.classes, validation) == (("a", "b"), None)
    (tmp_path / "train").rename(tmp_path / "val")
    with pytest.raises(DataError, match="has no folder train beside val, which is for validation"):
        find_images(tmp_path)
    (tmp_path / "plane").mkdir()
    (tmp_path / "plane" / "0.png").write_bytes(png(noise(4, 5, 3)))
    assert find_images(tmp_path)[0].classes == ("plane", "val")


def test_links_in_a_circle_end_and_take_no_files_of_other_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, a=1, b=1)
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "other").symlink_to(tmp_path / "b")
    listing, _ = find_images(tmp_path)
    assert listed(listing) == ["a/0.png", "b/0.png"]
    assert listing.ignored == Counter({"folders reached twice": 3})
    (tmp_path / "c").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match="are one folder"):
        find_images(tmp_path)


def test_names_that_are_not_utf8_are_read_and_printed(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/cl\xffss"
    os.mkdir(folder)
    for name in (b"\xe9.png", b"\xc3\xa9.png"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(png(noise(4, 4, 1)))
    listing, _ = find_images(tmp_path)
    assert listing.classes == ("cl\\xffss",)
    images = ImageFiles(listing, geometry=Geometry())
    assert read_all(images)[1] == []
    assert [images.name(0), images.name(1)] == ["cl\\xffss/é.png", "cl\\xffss/\\xe9.png"]


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        find_images(tmp_path)
    write_classes(tmp_path, full=1, hollow=0)
    with pytest.raises(DataError, match="hollow has no images"):
        find_images(tmp_path)
    (tmp_path / "x.png").touch()
    with pytest.raises(DataError, match=r"images \(x\.png, …\) beside folders \(full, …\)"):
        find_images(tmp_path)
    with pytest.raises(DataError, match="cannot be listed: No such file"):
        find_images(tmp_path / "gone")
    with pytest.raises(DataError, match="cannot be listed: Not a directory"):
        find_images(tmp_path / "x.png")


# Lists


def written_list(root: Path, text: str) -> Path:
    for name in ("a.png", "b c.jpg", "d,e.png", "plain"):
        (root / name).touch()
    path = root / "list.txt"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "names", "labels", "classes"),
    [
        ("a.png 1\nb c.jpg 0\n", ["a.png", "b c.jpg"], [1, 0], None),
        ("\ufeff# head\r\n\r\na.png,1\r\nd,e.png, 0", ["a.png", "d,e.png"], [1, 0], None),
        (
            "./a.png\tshark\nb c.jpg,great white shark\nplain shark",
            ["a.png", "b c.jpg", "plain"],
            [1, 0, 1],
            "great white shark;shark",
        ),
        ("a.png\nb c.jpg\nplain", ["a.png", "b c.jpg", "plain"], None, None),
        ("filename,label\r\na.png,1\r\nb c.jpg,0\r\n", ["a.png", "b c.jpg"], [1, 0], None),
        ("Image_Path\tlabel\na.png\t1\n", ["a.png"], [1], None),
        ("path\na.png\n", ["a.png"], None, None),
        (
            '"file","class"\n"d,e.png","shark, ""white"""\na.png, "cat"\n"b c.jpg",cat',
            ["d,e.png", "a.png", "b c.jpg"],
            [1, 0, 0],
            'cat;shark, "white"',
        ),
        ("a.png great white, shark\nb c.jpg cat\n", ["a.png", "b c.jpg"], [1, 0], "cat;great white, shark"),
    ],
)
def test_lists(tmp_path: Path, text: str, names: list[str], labels: list[int] | None, classes: str | None) -> None:
    listing = read_list(written_list(tmp_path, text))
    assert listed(listing) == names
    assert (None if listing.labels is None else listing.labels.tolist()) == labels
    assert listing.classes == (None if classes is None else tuple(classes.split(";")))


def test_a_list_as_csv_writes_it_is_known_as_one(tmp_path: Path) -> None:
    rows = [("filename", "label"), ("a, b.png", "cat"), ("c.png", "dog")]
    for name, _ in rows[1:]:
        (tmp_path / name).write_bytes(png(noise(4, 5, 3)))
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    source = open_source(tmp_path / "list.csv")
    assert (source.train.count, source.classes) == (2, ("cat", "dog"))


def test_a_list_may_stand_elsewhere(tmp_path: Path) -> None:
    path = written_list(tmp_path, "a.png 2\n")
    (tmp_path / "lists").mkdir()
    moved = path.rename(tmp_path / "lists" / "list.txt")
    listing = read_list(moved, root=tmp_path)
    assert listing.labels is not None
    assert (listing.labels.tolist(), listing.classes) == ([2], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png 1\ngone.png 1\n", "line 2: there is no file gone.png"),
        ("filename label\nfilename label\n", "line 2: there is no file filename"),
        ("cat,1\na.png,1\n", "line 1: there is no file cat"),
        ("a.png 1\n# x\n./a.png 1\n", "line 3: .*a second time"),
        ("a.png 1\nb c.jpg -1\n", "line 2: label -1 is out of range"),
        ("a.png 1\nb c.jpg cat\n", "line 2: label cat is no integer"),
        ("a.png 1\nb c.jpg +-1\n", r"line 2: label \+-1 is no integer"),
        ("a.png +-1\nb c.jpg 1\n", "line 2: label 1 is an integer"),
        ("a.png cat\nb c.jpg 1\n", "line 2: label 1 is an integer"),
        ("a.png 1.5\nb c.jpg 1\n", "line 2: label 1 is an integer"),
        ("a.png 1\nb c.jpg\n", "line 2: .* has no label"),
        ("a.png\nb c.jpg 1\n", "line 2: .* has a label"),
        ("a.png 99999999999999999999\nb c.jpg 1\n", "line 2: label 1 is an integer"),
        ("a\0.png 1\n", "line 1: there is no file"),
        ("filename,split,label\na.png,train,10\n", "line 2: it has 3 columns, where a path and a label are expected"),
        ("a.png,great white, shark\n", "line 1: it has 3 columns, .* put quotes around a label that has commas"),
        ('"a.png","train",10\n', "line 1: it has 3 columns"),
        ("a.png,cat\nb c.jpg,,dog\n", "line 2: it has 3 columns"),
        ("a.png\tn01443537\t0\t32\t44\t62\n", "line 1: it has 6 columns"),
        ("# nothing\n", "names no images"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_list(written_list(tmp_path, text))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_list(tmp_path / "gone.txt")
