"""PNG files taken apart, checked, and decoded to colours and alpha.

    png = read_png(path.read_bytes())                         # or UnreadableError: truncated, damaged, a bomb, …
    png.height, png.width, png.channels, png.depth
    colours, alpha = png_pixels(png)                          # (height, width, 1 or 3), and (height, width) or None

Every checksum is compared, and only the chunks that make the pixels are handed to Pillow.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import UnreadableError

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_VALUES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # per pixel
_KINDS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")  # of chunks that make the pixels
_MOST_DEFLATION = 1032  # bytes that one byte of a deflate stream can become


class Png(NamedTuple):
    """The parts of a PNG file that make its pixels; `core` is the file without anything else."""

    height: int
    width: int
    depth: int
    colour_type: int
    palette: bytes
    transparency: bytes
    animated: bool
    core: bytes

    @property
    def channels(self) -> int:
        """1 or 3; a palette that has only greys is monochrome."""
        if self.colour_type == 3:
            table = np.frombuffer(self.palette, np.uint8).reshape(-1, 3)
            return 1 if (table == table[:, :1]).all() else 3
        return 3 if self.colour_type in (2, 6) else 1


def read_png(data: bytes) -> Png:
    """Take a file apart, and check all that can be checked without decoding."""
    parts: dict[bytes, list[bytes]] = {}
    core = [PNG_MAGIC]
    for kind, chunk in _chunks(data):
        parts.setdefault(kind, []).append(chunk[8:-4] if kind != b"IDAT" else b"")
        if kind in _KINDS:
            core.append(chunk)
        elif kind[0] < ord("a"):
            raise UnreadableError(f"it has a chunk {kind!r} that no PNG of pixels has; save it again")
    width, height, depth, colour_type, *methods = struct.unpack(">IIBBBBB", parts[b"IHDR"][0])
    if depth not in _DEPTHS.get(colour_type, ()) or any(methods[:2]) or methods[2] > 1 or not 0 < height * width < 1 << 62:
        raise UnreadableError(f"its PNG header (0x{parts[b'IHDR'][0].hex()}) says what no PNG may; restore it")
    palette, transparency = (parts.get(kind, [b""])[0] for kind in (b"PLTE", b"tRNS"))
    if colour_type == 3 and not (0 < len(palette) <= 768 and len(palette) % 3 == 0):
        raise UnreadableError(f"its palette has {len(palette)} bytes; 3 for each of 1 to 256 colours are the rule: restore it")
    if any(len(parts.get(kind, ())) > 1 for kind in (b"IHDR", b"PLTE", b"tRNS")):
        raise UnreadableError("it has two headers or palettes; restore it")
    png = Png(height, width, depth, colour_type, palette, transparency, b"acTL" in parts, b"".join(core))
    needed = height * (width * depth * _VALUES[colour_type] // 8)
    if needed > _MOST_DEFLATION * len(png.core):
        raise UnreadableError(f"it claims {height} × {width} pixels, which its {len(data)} bytes cannot hold; restore it")
    return png


def png_pixels(png: Png) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
    """Decode to colours (height, width, 1 or 3) and alpha (height, width), if there is any."""
    values = _decoded(png)
    if png.colour_type == 3:
        return _looked_up(values[..., 0], png)
    if png.colour_type in (4, 6):
        return values[..., : png.channels], values[..., -1]
    if not png.transparency:
        return values, None
    if len(png.transparency) != 2 * png.channels or (png.depth == 16 and png.channels == 3):
        raise UnreadableError("its transparent colour (chunk tRNS) is damaged or has 16 bits per value; save it again without")
    key = np.frombuffer(png.transparency, ">u2")
    if png.depth < 8:
        key = key * (255 // ((1 << png.depth) - 1))
    return values, np.where((values == key).all(axis=-1), 0, 255).astype(np.uint8)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each chunk with its kind, from IHDR to IEND; Pillow does not compare the checksums of the pixels' chunks."""
    start, kind = len(PNG_MAGIC), b""
    while kind != b"IEND":
        size = int.from_bytes(data[start : start + 4])
        stop = start + 12 + size
        if len(data) < start + 12 or len(data) < stop:
            raise UnreadableError(
                f"it is truncated: it ends at offset {len(data)}, within a chunk that began at {start}; restore it"
            )
        chunk, kind = data[start:stop], data[start + 4 : start + 8]
        if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:]):
            raise UnreadableError(f"it is damaged: the checksum of its chunk {kind!r} at offset {start} is wrong; restore it")
        if (kind == b"IHDR") != (start == len(PNG_MAGIC)) or (kind == b"IHDR" and size != 13):
            raise UnreadableError(f"its chunk {kind!r} at offset {start} is not where or what a PNG has there; restore it")
        yield kind, chunk
        start = stop


def _decoded(png: Png) -> NDArray[Any]:
    """Decode: (height, width, values) as stored, except that 1, 2 and 4 bits of grey are spread over 0 to 255."""
    from PIL.PngImagePlugin import PngImageFile

    try:
        # The class itself: Image.open has a limit of pixels of its own, and would try other kinds.
        with PngImageFile(io.BytesIO(png.core)) as image:
            image.load()
            values = np.asarray(image.convert("L") if image.mode == "1" else image)
    except Exception as error:  # Pillow lets pass what its parts raise: struct.error, IndexError, SyntaxError, …
        raise UnreadableError(f"its PNG data is damaged ({error}); restore it") from error
    return values.reshape(*values.shape[:2], -1)


def _looked_up(indices: NDArray[np.uint8], png: Png) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    table = np.frombuffer(png.palette, np.uint8).reshape(-1, 3)
    if int(indices.max()) >= len(table):
        raise UnreadableError(f"it has a pixel of colour {indices.max()}, but {len(table)} colours in its palette; restore it")
    colours = table[indices][..., : png.channels]
    if not png.transparency:
        return colours, None
    opacity = np.full(256, 255, np.uint8)
    opacity[: len(png.transparency)] = np.frombuffer(png.transparency, np.uint8)[:256]
    return colours, opacity[indices]
