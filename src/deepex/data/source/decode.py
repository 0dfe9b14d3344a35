"""The bytes of one PNG or JPEG file to the pixels of one sample, or the reason why not.

    target = Target(size=(224, 224), channels=3, dtype=np.dtype(np.uint8), geometry=Geometry(resize=256, crop=(224, 224)))
    notes = Counter()
    pixels = decode(path.read_bytes(), target, notes)         # (224, 224, 3), or UnreadableError

The kind is told by the first bytes, not by the name: ImageNet has a PNG that is called .JPEG. The header is checked before anything
is decoded. Pixels come out as they are in the file. What cannot be kept exactly is refused or, with `convert`, changed and counted:

    CMYK                        to RGB
    alpha, not fully opaque     laid over black
    16 bits (colour always; grey where uint8 is asked for)       the high byte of each value
    animated PNG                the image that viewers without animation show
    colour, for 1 channel       ITU-R 601 luma

Monochrome for 3 channels is replicated, and counted too. The orientation in EXIF is ignored, as by the readers of the other
frameworks, and so are colour profiles and gamma. A JPEG that a resize halves or more is decoded at 1/2, 1/4 or 1/8, never
below the size that is asked for; the decoder is exact otherwise (no fast DCT, smooth chroma).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepex.data.geometry import Geometry, scratch, text
from deepex.data.source.base import UnreadableError
from deepex.data.source.png import PNG_MAGIC, Png, png_pixels, read_png
from deepex.errors import DataError

MOST_PIXELS = 89_478_485  # as Pillow: a quarter of 1 GiB of RGB pixels
_MOST_SCANS = 500  # libjpeg-turbo's advice: each scan of a progressive JPEG goes over all pixels, whatever its length
_JPEG_MAGIC = b"\xff\xd8\xff"
_OTHER_KINDS = {
    b"GIF8": "a GIF",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"RIFF": "a WebP or other RIFF",
    b"\x89HDF": "an HDF5",
    b"\x93NUMPY": "a NumPy",
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a ZIP",
    b"\x1f\x8b": "a gzip",
}

REPLICATED = "monochrome, replicated to 3 channels"
_CMYK = ("it is CMYK, and a dataset holds monochrome or RGB", "CMYK, converted to RGB")
_ALPHA = ("it has pixels that are not fully opaque, and a dataset holds no alpha", "alpha, laid over black")
_DEEP = ("it has 16 bits per value, which {held}", "16 bits, reduced to the high byte")
_SHALLOW = ("it has {depth} bits per value, and the dataset's images have 16", "8 bits, times 257 for 16")
_ANIMATED = ("it is animated, and a sample is one image", "animated, first image taken")
_COLOUR = ("it is in colour, and the dataset has 1 channel (--channels 3 keeps colour)", "colour, converted to monochrome")


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """What a sample must be: `size` (height, width) after `geometry`, `depth` bits per value; None takes each file as it is."""

    size: tuple[int, int] | None
    channels: int
    dtype: np.dtype[Any]
    geometry: Geometry
    depth: Literal[8, 16] | None = None
    convert: bool = False
    max_pixels: int = MOST_PIXELS


class Header(NamedTuple):
    """What a file claims to hold. `channels`: 1 monochrome, 3 colour, 4 CMYK, alpha not counted. `png`: its parts, if it is one."""

    height: int
    width: int
    channels: int
    png: Png | None = None

    @property
    def is_deep_grey(self) -> bool:
        """Plain grey of 16 bits, which float32 holds exactly."""
        return self.png is not None and self.png.depth == 16 and self.png.colour_type == 0


def read_header(data: bytes, max_pixels: int = MOST_PIXELS) -> Header:
    """Check everything that can be checked without decoding."""
    if data.startswith(_JPEG_MAGIC):
        header = _jpeg_header(data)
    elif data.startswith(PNG_MAGIC):
        png = read_png(data)
        header = Header(png.height, png.width, png.channels, png)
    else:
        raise UnreadableError(_unknown_kind(data))
    if header.height * header.width > max_pixels:
        raise UnreadableError(
            f"it claims {header.height} × {header.width} pixels, more than the limit of {max_pixels} against decompression "
            "bombs; raise --max-pixels if the file is meant to be as large"
        )
    return header


def decode(data: bytes, target: SampleSize, notes: Counter[str]) -> NDArray[Any]:
    """Give the pixels (height, width, channels) of `target`, and add to `notes` what was done to them.

    They may lie in memory that the next call of this thread uses again: copy them.
    """
    header = read_header(data, target.max_pixels)
    _check_size(header, target)
    done: list[str] = []
    pixels = _decode_jpeg(data, header, target, done) if header.png is None else _decode_png(header.png, target, done)
    if pixels.shape[2] < target.channels:
        done.append(REPLICATED)
        pixels = np.broadcast_to(pixels, (*pixels.shape[:2], target.channels))
    notes.update(done)
    return pixels


def _unknown_kind(data: bytes) -> str:
    if not data:
        return "it is empty (0 bytes); restore it"
    for magic, kind in _OTHER_KINDS.items():
        if data.startswith(magic):
            return f"it is {kind} file whatever its name says, neither PNG nor JPEG; convert it"
    return f"it is neither PNG nor JPEG: it begins with 0x{data[:8].hex()}; restore it, or leave it out"


def _check_size(header: Header, target: SampleSize) -> None:
    size = (header.height, header.width)
    between = target.geometry.resized(*size)
    if between[0] * between[1] > target.max_pixels:
        raise UnreadableError(
            f"it is {text(size)}, which the resize makes {text(between)}: give --resize HEIGHTxWIDTH, or leave it out"
        )
    try:
        made = target.geometry.size(*size)
    except DataError as error:
        raise UnreadableError(str(error)) from None
    if target.size is not None and made != target.size:
        after = "" if made == size else f" ({text(made)} after resize and crop)"
        raise UnreadableError(
            f"it is {text(size)}{after}, but the dataset's images are {text(target.size)} (height × width); bring all to one "
            f"size with --resize {text(target.size)}, or with --resize and --crop"
        )


def _change(rule: tuple[str, str], target: SampleSize, done: list[str], **words: str) -> None:
    """Refuse, or count what `convert` allows."""
    if not target.convert:
        raise UnreadableError(f"{rule[0].format(**words)}; give --convert to have it converted ({rule[1]})")
    done.append(rule[1])


def _jpeg_header(data: bytes) -> Header:
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except KeyError:  # how simplejpeg says that it has no name for a colour space or a subsampling
        raise UnreadableError(
            "it is a JPEG of an unusual colour space or chroma subsampling; save it again as RGB, 4:2:0"
        ) from None
    except ValueError as error:
        raise UnreadableError(f"its JPEG header is damaged or of an unusual kind ({error}); restore it or save it again") from None
    scans = data.count(b"\xff\xda") if _may_be_progressive(data) else 1  # counting takes a tenth of the time of decoding
    if scans > _MOST_SCANS:
        raise UnreadableError(f"it has {scans} scans; more than {_MOST_SCANS} are refused as a decompression bomb: save it again")
    return Header(int(height), int(width), {"Gray": 1, "CMYK": 4, "YCCK": 4}.get(space, 3))


def _may_be_progressive(data: bytes) -> bool:
    """Whether the frame header (SOF) is of a kind that allows for many scans, or is not where it should be."""
    at = 2
    while data[at : at + 1] == b"\xff":
        marker = data[at + 1 : at + 2]
        if b"\xc0" <= marker <= b"\xcf" and marker not in (b"\xc4", b"\xc8", b"\xcc"):
            return marker not in (b"\xc0", b"\xc1")
        at += 1 if marker == b"\xff" else 2 + int.from_bytes(data[at + 2 : at + 4])
    return True


def _decode_jpeg(data: bytes, header: Header, target: SampleSize, done: list[str]) -> NDArray[Any]:
    import simplejpeg

    if header.channels == 4:
        _change(_CMYK, target, done)
    if header.channels > 1 and target.channels == 1:
        _change(_COLOUR, target, done)
    if target.depth == 16:
        _change(_SHALLOW, target, done, depth="8")
    eighths = _jpeg_scale(header, target.geometry)
    height, width = (-(-side * eighths // 8) for side in (header.height, header.width))
    space = "GRAY" if header.channels == 1 or target.channels == 1 else "RGB"
    try:
        memory = scratch("decoded", height * width * (1 if space == "GRAY" else 3))
        pixels = simplejpeg.decode_jpeg(data, space, min_height=height, min_width=width, buffer=memory)
    except ValueError as error:  # strict by default: what libjpeg warns of is raised as well
        raise UnreadableError(f"its JPEG data is damaged ({error}); restore it") from None
    return target.geometry.apply(_as_target(pixels, target), original=(header.height, header.width), scale=eighths / 8)


def _jpeg_scale(header: Header, geometry: Geometry) -> int:
    """The smallest scale, in eighths, that leaves at least the pixels that the resize asks for.

    Only halves have SIMD in libjpeg-turbo: decoding at 3/4 takes longer than decoding in full. Below 64 pixels two scales can
    round to one size.
    """
    size = (header.height, header.width)
    if geometry.resize is None or min(size) < 64:
        return 8
    least = geometry.resized(*size)
    return next((n for n in (1, 2, 4) if all(of * n >= 8 * to for of, to in zip(size, least, strict=True))), 8)


def _decode_png(png: Png, target: SampleSize, done: list[str]) -> NDArray[Any]:
    if png.animated:
        _change(_ANIMATED, target, done)
    plain_grey = png.colour_type == 0
    if png.depth == 16 and (target.dtype == np.uint8 or target.depth == 8 or not plain_grey):
        _change(_DEEP, target, done, held=_why_not_deep(target) if plain_grey else "only plain grey can keep")
    elif target.depth == 16 and png.depth < 16:
        _change(_SHALLOW, target, done, depth=str(png.depth))
    if png.channels > 1 and target.channels == 1:
        _change(_COLOUR, target, done)
    pixels, alpha = png_pixels(png)
    if pixels.dtype == np.uint16 and (target.dtype == np.uint8 or target.depth == 8):
        pixels = (pixels >> 8).astype(np.uint8)
    if alpha is not None and int(alpha.min()) < 255:
        _change(_ALPHA, target, done)
        pixels = ((pixels.astype(np.uint32) * alpha[..., np.newaxis] + 127) // 255).astype(pixels.dtype)
    if pixels.shape[2] > target.channels:
        pixels = _luma(pixels)
    return target.geometry.apply(_as_target(pixels, target))


def _why_not_deep(target: SampleSize) -> str:
    if target.dtype == np.uint8:
        return "the dataset (uint8) cannot hold (--dtype float32 keeps them)"
    return "the dataset's images, of 8 bits, have not"


def _as_target(pixels: NDArray[Any], target: SampleSize) -> NDArray[Any]:
    """In the type of the target; bytes, where it has 16 bits, spread over these."""
    made = pixels.astype(target.dtype, copy=False)
    return made * np.float32(257) if target.depth == 16 and pixels.dtype == np.uint8 else made


def _luma(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    weights = np.array([19595, 38470, 7471], np.uint32)  # of 65536, as Pillow has it
    return ((pixels @ weights + 32768) >> 16).astype(np.uint8)[..., np.newaxis]
